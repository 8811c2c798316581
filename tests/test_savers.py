# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in graphs and sessions: the v1 Saver, and tf.train.Checkpoint there."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

v1 = tf.compat.v1
SUM = tf.VariableAggregation.SUM
ON_READ = tf.VariableSynchronization.ON_READ


@pytest.fixture
def graph() -> Iterator[tf.Graph]:
    with tf.Graph().as_default() as graph:
        yield graph


def v1_variables(num_replicas: int | None, value: float) -> list[tf.Variable]:
    """Makes three variables in the default graph, the last one ON_READ."""
    repl = helpers.make(num_replicas) if num_replicas else None
    facts = {"synchronization": ON_READ, "aggregation": SUM} if repl else {}
    with repl.context() if repl else tf.name_scope(""):
        return [
            v1.get_variable("w", initializer=[value, value + 1]),
            v1.get_variable("scope/b", initializer=value, use_resource=True),
            v1.get_variable("count", initializer=value, trainable=False, **facts),
        ]


def component_values(variables: list[Any], session: v1.Session) -> list[Any]:
    return [
        session.run(list(v.components)) if hasattr(v, "components") else None
        for v in variables
    ]


@pytest.mark.parametrize("explicit", [False, True], ids=["default", "explicit"])
@pytest.mark.parametrize(("source", "target"), [(2, None), (None, 2), (2, 4)])
def test_savers_of_v1(
    source: int | None, target: int | None, explicit: bool, tmp_path: pathlib.Path
) -> None:
    with tf.Graph().as_default(), helpers.session() as session:
        variables = v1_variables(source, 3.0)
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver(variables if explicit else None)
        path = saver.save(session, str(tmp_path / "c"), global_step=7)
    assert [name for name, _ in tf.train.list_variables(path)] == [
        "count",
        "scope/b",
        "w",
    ]
    with tf.Graph().as_default(), helpers.session() as session:
        variables = v1_variables(target, 0.0)
        session.run(v1.global_variables_initializer())
        v1.train.Saver(variables if explicit else None).restore(session, path)
        weights, bias, count = session.run(variables)
        np.testing.assert_array_equal(weights, [3.0, 4.0])
        assert bias == 3.0 and count == 3.0
        if target:
            parts = component_values(variables, session)
            np.testing.assert_array_equal(parts[0], [[3.0, 4.0]] * target)
            assert parts[1] == [3.0] * target
            assert parts[2] == [3.0] + [0.0] * (target - 1)


@pytest.mark.usefixtures("graph")
def test_a_saver_that_renames_is_refused() -> None:
    variables = v1_variables(2, 1.0)
    with pytest.raises(
        replicator.ReplicatorError,
        match=r"(?s)Saver cannot rename.*w:0.*Fix: give it a list",
    ):
        v1.train.Saver({"other": variables[0]})


def test_savers_in_a_training_session(tmp_path: pathlib.Path) -> None:
    """A MonitoredTrainingSession saves by itself, and resumes where it stopped."""
    ends = []
    for _ in range(2):
        with tf.Graph().as_default():
            repl = helpers.make(2)
            with repl.context():
                v1.train.create_global_step()
                weights = v1.get_variable("w", initializer=1.0)
                optimizer = repl.wrap_optimizer(v1.train.MomentumOptimizer(0.1, 0.9))

            def step_fn(weights: Any = weights, optimizer: Any = optimizer) -> Any:
                loss = (weights - repl.replica_id) ** 2  # noqa: B023
                step = v1.train.get_global_step()
                with tf.control_dependencies([optimizer.minimize(loss, step)]):
                    return weights.read_value(), tf.identity(step)

            fetches = repl.run(step_fn)
            with v1.train.MonitoredTrainingSession(
                **helpers.monitored(),
                checkpoint_dir=str(tmp_path),
                log_step_count_steps=None,
            ) as session:
                for _ in range(2):
                    values, steps = session.run(fetches)
            ends.append((values[0], int(steps[0])))
            assert values[0] == values[1]
    weight, velocity, expected = 1.0, 0.0, []
    for _ in range(4):
        velocity = 0.9 * velocity + (2 * weight - 1)  # the mean of 2w and 2(w - 1)
        weight -= 0.1 * velocity
        expected.append(weight)
    assert [step for _, step in ends] == [2, 4]
    np.testing.assert_allclose([w for w, _ in ends], expected[1::2], rtol=1e-5)


def test_object_checkpoints_in_a_session(tmp_path: pathlib.Path) -> None:
    with tf.Graph().as_default(), helpers.session() as session:
        weights, bias, count = v1_variables(2, 3.0)
        session.run(v1.global_variables_initializer())
        checkpoint = v1.train.Checkpoint(w=weights, b=bias, c=count)
        session.run(checkpoint.save_counter.initializer)
        path = checkpoint.save(str(tmp_path / "c"), session=session)
    plain = [tf.Variable([0.0, 0.0]), tf.Variable(0.0), tf.Variable(0.0)]
    restored = tf.train.Checkpoint(w=plain[0], b=plain[1], c=plain[2]).restore(path)
    restored.assert_consumed()
    assert [v.numpy().tolist() for v in plain] == [[3.0, 4.0], 3.0, 3.0]
    with tf.Graph().as_default(), helpers.session() as session:
        weights, bias, count = variables = v1_variables(4, 0.0)
        status = v1.train.Checkpoint(w=weights, b=bias, c=count).restore(path)
        status.assert_consumed().run_restore_ops(session)
        parts = component_values(variables, session)
        np.testing.assert_array_equal(parts[0], [[3.0, 4.0]] * 4)
        assert parts[2] == [3.0, 0.0, 0.0, 0.0]


def test_a_saver_may_reshape(tmp_path: pathlib.Path) -> None:
    def make(num_replicas: int, shape: list[int]) -> tf.Variable:
        with helpers.make(num_replicas).context():
            return v1.get_variable("w", initializer=tf.reshape([1.0, 2.0], shape))

    with tf.Graph().as_default(), helpers.session() as session:
        make(2, [2])
        session.run(v1.global_variables_initializer())
        path = v1.train.Saver().save(session, str(tmp_path / "c"))
    with tf.Graph().as_default(), helpers.session() as session:
        variable = make(3, [1, 2])
        v1.train.Saver(reshape=True).restore(session, path)
        parts = session.run(list(variable.components))
        np.testing.assert_array_equal(parts, [[[1.0, 2.0]]] * 3)


PLACES: dict[str, dict[str, Any]] = {
    "mirrored": {"variables": "mirrored"},
    "sharded": {"variables": "sharded"},
    "copies": {"strategy": replicator.strategy.PS(local_proxy_variable=True)},
    "parts": {"strategy": replicator.strategy.PartitionedPS()},
}


def _with_partitioner(place: str | None) -> tuple[Any, Any]:
    """Returns a variable that TensorFlow splits in two, and an update of it.

    Args:
        place: Where its parts are; None: in a program without replicas.
    """
    repl = None if place is None else helpers.make(2, **PLACES[place])
    with contextlib.nullcontext() if repl is None else repl.context():
        whole = v1.get_variable(
            "x",
            [5, 2],
            initializer=v1.ones_initializer(),
            partitioner=v1.fixed_size_partitioner(2),
            use_resource=True,
        )
        optimizer = v1.train.AdamOptimizer(0.1)
        optimizer = optimizer if repl is None else repl.wrap_optimizer(optimizer)
    factors = tf.reshape(tf.range(1.0, 11.0), [5, 2])

    def step_fn() -> Any:
        loss = tf.reduce_sum(tf.convert_to_tensor(whole) ** 2 * factors)
        gradients = tf.gradients(loss, list(whole))
        return optimizer.apply_gradients(zip(gradients, whole, strict=True))

    return whole, step_fn() if repl is None else repl.run(step_fn)


@pytest.mark.battery(3)
@pytest.mark.parametrize("explicit", [False, True], ids=["default", "explicit"])
@pytest.mark.parametrize(
    ("source", "target"),
    [("mirrored", None), ("parts", None), ("parts", "copies")]
    + [(None, place) for place in PLACES],
)
def test_savers_of_variables_with_a_partitioner(
    source: str | None, target: str | None, explicit: bool, tmp_path: pathlib.Path
) -> None:
    """Slices are saved as TensorFlow saves them, and restored on every replica."""
    ends = []
    for place in (source, target):
        with tf.Graph().as_default(), helpers.session() as session:
            whole, update = _with_partitioner(place)
            saver = v1.train.Saver(list(whole) if explicit else None)
            value, path = tf.convert_to_tensor(whole), str(tmp_path / "c")
            components = [
                [component.read_value() for component in part.components]
                for slice_ in whole
                for part in getattr(slice_, "parts", (slice_,))
                if place is not None
            ]
            session.run(v1.global_variables_initializer())
            session.run(update)
            if place == source and not ends:
                ends.append(session.run(value))
                saver.save(session, path)
                session.run(update)
                ends.append(session.run(value))
                continue
            session.run(update)
            saver.restore(session, path)
            np.testing.assert_array_equal(session.run(value), ends[0])
            for values in session.run(components):
                np.testing.assert_array_equal(values, values[:1] * len(values))
            if not explicit:  # the slots are restored, too
                session.run(update)
                np.testing.assert_allclose(session.run(value), ends[1], rtol=1e-6)
    names = {name for name, _ in tf.train.list_variables(path)}
    slots = {"beta1_power", "beta2_power", "x/Adam", "x/Adam_1"}
    assert names == {"x"} | (set() if explicit else slots)


@pytest.mark.usefixtures("graph")
def test_a_saver_of_a_whole_with_a_partitioner_is_refused() -> None:
    whole, _ = _with_partitioner("mirrored")
    with pytest.raises(replicator.UnsupportedError, match=r"Saver\(list\(variable\)\)"):
        v1.train.Saver([whole])


@pytest.mark.parametrize("place", PLACES)
def test_initial_values_of_slices_from_a_checkpoint(
    place: str, tmp_path: pathlib.Path
) -> None:
    with tf.Graph().as_default(), helpers.session() as session:
        whole, update = _with_partitioner(None)
        session.run(v1.global_variables_initializer())
        session.run(update)
        expected = session.run(tf.convert_to_tensor(whole))
        path = v1.train.Saver().save(session, str(tmp_path / "c"))
    with tf.Graph().as_default(), helpers.session() as session:
        whole, update = _with_partitioner(place)
        v1.train.init_from_checkpoint(path, {"x": list(whole)})
        session.run(v1.global_variables_initializer())
        np.testing.assert_array_equal(
            session.run(tf.convert_to_tensor(whole)), expected
        )


def test_initial_values_of_a_variable_in_parts_from_a_checkpoint(
    tmp_path: pathlib.Path,
) -> None:
    value = np.arange(10.0, dtype=np.float32).reshape([5, 2])
    with tf.Graph().as_default(), helpers.session() as session:
        v1.get_variable("x", initializer=value)
        session.run(v1.global_variables_initializer())
        path = v1.train.Saver().save(session, str(tmp_path / "c"))
    with tf.Graph().as_default(), helpers.session() as session:
        with helpers.make(2, **PLACES["parts"]).context():
            variable = v1.get_variable("x", initializer=tf.zeros([5, 2]))
        v1.train.init_from_checkpoint(path, {"x": variable})
        session.run(v1.global_variables_initializer())
        np.testing.assert_array_equal(session.run(variable), value)
