# SPDX-License-Identifier: Apache-2.0
"""Compressors' state in checkpoints, for the same or other numbers of replicas."""

from __future__ import annotations

import functools
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.strategy import AllReduceSynchronizer
from replicator.variables.collected import Owed
from tests import helpers
from tests.compressors import laws

EVERY = (
    "ef(bf16)",
    "ef(int8)",
    "ef(topk(ratio=0.1))",
    "ef(powersgd(rank=2))",
    "ef(powersgd(rank=2, warm_start=False, start_step=3))",
    "int8",
)


def after(given: laws.Given, begin: int, end: int | None = None) -> laws.Given:
    """Returns the gradients of some of the steps."""
    return laws.Given(tuple(gradient[begin:end] for gradient in given.gradients))


def checkpoint(training: laws.Training) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(model=training.variables, optimizer=training.optimizer)


def bits(training: laws.Training) -> dict[str, list[bytes]]:
    """Returns all state of a training, on each replica."""
    state = {f"variable {k}": v for k, v in enumerate(training.variables)}
    return {
        name: [value.tobytes() for value in helpers.components(variable)]
        for name, variable in (state | training.memory).items()
    }


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("compressor", "early"),
    [*((compressor, True) for compressor in EVERY), (EVERY[1], False)],
)
def test_a_restored_run_goes_on_to_the_bit(
    compressor: str, early: bool, tmp_path: pathlib.Path
) -> None:
    """Restored before the first step, or once the variables exist."""
    given = laws.Given.random(6, 3)
    repl = helpers.make(3)
    first = laws.Training(repl, after(given, 0, 4), compressor)
    first.run()
    path = checkpoint(first).write(str(tmp_path / "x"))
    first.given = after(given, 4)
    first.run()

    second = laws.Training(helpers.make(3), after(given, 4), compressor)
    if early:
        status = checkpoint(second).read(path)
        second.run()
        status.assert_consumed()
    else:
        second.run()
        checkpoint(second).read(path).assert_consumed()
        second.run()
    assert bits(second) == bits(first)


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("compressor", "replicas"),
    [(EVERY[0], 2), (EVERY[1], 1), (EVERY[2], 2), (EVERY[3], 1), (EVERY[4], 4)],
)
def test_other_replicas_owe_the_same_in_all(
    compressor: str, replicas: int, tmp_path: pathlib.Path
) -> None:
    given = laws.Given.random(4, 3)
    first = laws.Training(helpers.make(3), given, compressor)
    first.run()
    path = checkpoint(first).write(str(tmp_path / "x"))

    later = laws.Given.random(3, replicas, seed=1)
    second = laws.Training(helpers.make(replicas), later, compressor)
    checkpoint(second).read(path)
    second.run()
    for k, (one, two) in enumerate(zip(given.sums(), later.sums(), strict=True)):
        actual = second.received(k) + second.owed(k)
        np.testing.assert_allclose(actual, one + two, atol=1e-5)
    if replicas == 1:  # which sends all that it has
        assert all(not second.owed(k).any() for k in range(len(laws.SHAPES)))


def test_a_checkpoint_holds_a_row_for_each_replica(tmp_path: pathlib.Path) -> None:
    training = laws.Training(helpers.make(3), laws.Given.random(2, 3), "ef(topk)")
    training.run()
    path = checkpoint(training).write(str(tmp_path / "x"))
    saved = {
        name: tf.train.load_variable(path, name)
        for name, _ in tf.train.list_variables(path)
        if "residual_0" in name
    }
    (rows,) = saved.values()
    assert rows.shape == (3, *laws.SHAPES[0])
    for row, own in zip(rows, training.memory["residual_0"].components, strict=True):
        np.testing.assert_array_equal(row[np.newaxis], own)


def test_a_v1_saver_restores_rows(tmp_path: pathlib.Path) -> None:
    def make() -> tf.compat.v1.train.Optimizer:
        return tf.compat.v1.train.GradientDescentOptimizer(1.0)

    given = laws.Given.random(6, 2)
    ends = []
    for run in ("whole", "first", "second"):
        with tf.Graph().as_default():
            begin = 3 if run == "second" else 0
            training = laws.Training(
                helpers.make(2), after(given, begin), "ef(int8)", make
            )

            def step_fn(element: tuple, training: laws.Training = training) -> object:
                pairs = zip(element[0], training.variables, strict=True)
                return training.optimizer.apply_gradients(pairs)

            result = training.repl.run(step_fn, training.input_fn)
            saver = tf.compat.v1.train.Saver()
            everything = [training.variables, list(training.memory.values())]
            reads = tf.nest.map_structure(lambda v: v.read_value(), everything)
            with helpers.monitored_session() as session:
                if run == "second":
                    saver.restore(_plain(session), str(tmp_path / "x"))
                for _ in range({"whole": 6, "first": 3, "second": 3}[run]):
                    session.run(result)
                if run == "first":
                    saver.save(_plain(session), str(tmp_path / "x"))
                ends.append(session.run(reads))
    whole, _, second = ends
    for one, two in zip(tf.nest.flatten(whole), tf.nest.flatten(second), strict=True):
        assert one.tobytes() == two.tobytes()


def _plain(session: object) -> tf.compat.v1.Session:
    """Returns the session inside of a monitored one, for Savers."""
    while not isinstance(session, tf.compat.v1.Session):
        session = session._sess  # type: ignore[attr-defined]
    return session


def test_residuals_survive_another_bucket() -> None:
    """A bucket's composition affects neither the residuals nor their names."""
    given = laws.Given.random(4, 2)
    training = laws.Training(
        helpers.make(2, variables="mirrored"), after(given, 0, 2), "ef(bf16)"
    )
    training.run()
    before = set(training.memory)
    for variable, group in zip(training.variables, (1, 2, 1), strict=True):
        helpers.synchronize(variable, AllReduceSynchronizer(group=group))
    training.given = after(given, 2)
    training.step_fn = functools.partial(training.step_fn)  # which is rebuilt
    training.run()
    assert set(training.memory) == before
    training.given = given
    training.assert_nothing_lost()


def test_optimizers_of_one_kind_keep_theirs_apart() -> None:
    repl = helpers.make(2)
    both = [
        laws.Training(repl, laws.Given.random(3, 2, seed), "ef(topk)")
        for seed in range(2)
    ]
    for training in both:
        training.run()
    for training in both:
        training.assert_nothing_lost()


def test_what_is_kept_is_read_and_written_outside_of_steps() -> None:
    training = laws.Training(helpers.make(2), laws.Given.random(2, 2), "ef(topk)")
    training.run()
    residual = training.memory["residual_0"]
    assert isinstance(residual.placement, Owed)
    rows = residual.numpy()
    assert rows.shape == (2, *laws.SHAPES[0])
    residual.assign(tf.zeros_like(rows))
    assert not training.owed(0).any()
    residual.assign(np.ones([5, *laws.SHAPES[0]], "f"))  # of five other replicas
    assert [float(c[0, 0, 0]) for c in residual.components] == [5.0, 0.0]
    training.run()


def test_plain_checkpoints_are_read_where_nothing_is_compressed(
    tmp_path: pathlib.Path,
) -> None:
    """An optimizer without compressors needs no state from them."""
    plain = tf.keras.optimizers.SGD(1.0, momentum=0.5)
    variable = tf.Variable([1.0, 2.0])
    plain.apply([tf.ones([2])], [variable])
    saved = tf.train.Checkpoint(v=variable, optimizer=plain).write(str(tmp_path / "x"))
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable([0.0, 0.0])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0, momentum=0.5))
    repl.run(lambda: optimizer.apply([tf.ones([2])], [w]))
    tf.train.Checkpoint(v=w, optimizer=optimizer).read(saved).assert_consumed()
    assert w.numpy().tolist() == [0.0, 1.0]


def test_all_reduce_keeps_what_it_owes_by_its_place() -> None:
    repl = helpers.make(2)
    x = tf.constant([3.0, 2.0])

    def step_fn() -> tuple[tf.Tensor, tf.Tensor]:
        one = repl.all_reduce(x, compressor="ef(topk(ratio=0.5))")
        two = repl.all_reduce(-x, "mean", compressor="ef(topk(ratio=0.5))")
        return one, two

    actual = [repl.run(step_fn) for _ in range(3)]
    ones = [one[0].numpy().tolist() for one, _ in actual]
    twos = [two[0].numpy().tolist() for _, two in actual]
    assert ones == [[6.0, 0.0], [0.0, 8.0], [12.0, 0.0]]
    assert twos == [[-3.0, 0.0], [0.0, -4.0], [-6.0, 0.0]]


def test_random_numbers_go_on_where_they_were() -> None:
    """And differ in each step, and on each replica."""
    repl = helpers.make(2)
    x = replicator.PerReplica(*[tf.linspace(0.0, 1.0, 500)] * 2)
    step = repl.build(lambda x: repl.all_reduce(x, compressor="int8"), args=[x])
    first, second = (step(x)[0].numpy() for _ in range(2))
    assert (first != second).any()
