# SPDX-License-Identifier: Apache-2.0
"""Variables that are created inside a step_fn, or under the context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

v1 = tf.compat.v1


def distinct(variables: list[tf.Variable]) -> int:
    return len({variable.ref() for variable in variables})


def several(made: list[tf.Variable]) -> Callable[[], tf.Tensor]:
    """Returns a step that creates four variables at two lines, in each call."""

    def step_fn() -> tf.Tensor:
        total = tf.constant(0.0)
        for k in range(3):
            made.append(tf.Variable(float(k), name="in_loop"))
            total += made[-1].assign_add(1.0)
        made.append(tf.Variable(10.0, name="after"))
        return total + made[-1]

    return step_fn


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_each_place_makes_one_variable_for_all_replicas(
    mode: str, num_replicas: int
) -> None:
    variables: list[tf.Variable] = []
    step_fn = several(variables)
    repl = helpers.make(num_replicas)
    results = helpers.run(mode, repl, lambda: step_fn, steps=2)
    assert distinct(variables) == 4
    assert all(isinstance(v, replicator.ReplicatedVariable) for v in variables)
    assert list(results) == [19.0] * num_replicas  # 2 + 3 + 4 + 10, lasting over steps


def test_all_builds_of_a_step_share_its_variables() -> None:
    variables: list[tf.Variable] = []
    step_fn = several(variables)
    repl = helpers.make(2)
    ways = [
        lambda: repl.run(step_fn),
        tf.function(lambda: repl.run(step_fn)),
        lambda: helpers.make(2).run(step_fn),
    ]
    assert float(ways[0]()[1]) == 16.0
    assert float(ways[1]()[1]) == 19.0
    assert distinct(variables) == 4
    assert float(ways[2]()[1]) == 16.0  # another Replicator, other variables
    assert distinct(variables) == 8
    assert float(ways[0]()[1]) == 22.0
    repl.run(several(variables))  # another step
    assert distinct(variables) == 12


def test_every_graph_has_variables_of_its_own() -> None:
    variables: list[tf.Variable] = []
    step_fn = several(variables)
    repl = helpers.make(2)
    for in_function in (False, True, False):
        with tf.Graph().as_default():

            def build() -> Any:
                return repl.run(step_fn)

            fetches = tf.function(build)() if in_function else build()
            with v1.train.MonitoredSession() as session:
                assert session.run(fetches[1]) == 16.0
    assert distinct(variables) == 12


def test_the_usual_idiom_creates_once() -> None:
    repl = helpers.make(2)

    class Model(tf.Module):
        weights: tf.Variable | None = None

        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            if self.weights is None:
                with self.name_scope:
                    self.weights = tf.Variable(tf.random.normal([3, 2]), name="w")
            return x @ self.weights

    model = Model(name="model")

    def step_fn() -> tf.Tensor:
        return model(tf.ones([1, 3]))

    one, two = repl.run(step_fn)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(model(tf.ones([1, 3])), one, rtol=1e-6)
    assert [v.name for v in model.trainable_variables] == ["model/w:0"]
    helpers.assert_replicas_equal(model.variables)


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("callable_value", [True, False])
def test_random_initial_values_are_equal_on_all_replicas(
    mode: str, callable_value: bool
) -> None:
    repl = helpers.make(3)

    def step_fn() -> tf.Tensor:
        if callable_value:
            variable = tf.Variable(lambda: tf.random.normal([5]))
        else:
            variable = tf.Variable(tf.random.normal([5]) * 2.0)
        return variable.read_value()

    values = helpers.run(mode, repl, lambda: step_fn)
    assert np.asarray(values[0]).std() > 0
    for value in values[1:]:
        np.testing.assert_array_equal(value, values[0])


def test_initial_tensors_of_a_function_in_a_graph_leave_the_function() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():

        @tf.function
        def build() -> Any:
            return repl.run(lambda: tf.Variable(tf.ones([2]) * 3.0).read_value())

        fetches = build()
        with v1.train.MonitoredSession() as session:
            np.testing.assert_array_equal(session.run(fetches), [[3.0, 3.0]] * 2)


def by_shape(repl: replicator.Replicator) -> Any:
    size = repl.replica_id + 1
    return tf.Variable(tf.zeros([size]))


def by_lazy_shape(repl: replicator.Replicator) -> Any:
    size = repl.replica_id + 1
    return tf.Variable(lambda: tf.zeros([size]))


def by_dtype(repl: replicator.Replicator) -> Any:
    return tf.Variable([1.0] if repl.replica_id else [1])


def by_layer(repl: replicator.Replicator) -> Any:
    layer = tf.keras.layers.Dense(repl.replica_id + 1, use_bias=False)
    return tf.reduce_sum(layer(tf.ones([1, 1])))


@pytest.mark.parametrize(
    ("create", "first", "second"),
    [
        (by_shape, r"float32\(1,\)", r"float32\(2,\)"),
        (by_lazy_shape, r"float32\(1,\)", r"float32\(2,\)"),
        (by_dtype, r"int32\(1,\)", r"float32\(1,\)"),
        (by_layer, r"float32\(1, 1\)", r"float32\(1, 2\)"),
    ],
)
def test_different_variables_at_one_place_are_refused(
    create: Callable[[Any], Any], first: str, second: str
) -> None:
    repl = helpers.make(2)

    def step_fn() -> Any:
        return create(repl)

    with pytest.raises(
        replicator.MismatchError,
        match=rf"(?s)different variables at .*test_creation.py:\d+ in {create.__name__}"
        rf": {first} first, then {second}.*Fix: let all replicas create the same",
    ):
        repl.run(step_fn)


def test_an_initial_value_of_the_batch_is_refused() -> None:
    repl = helpers.make(2)

    def step_fn(batch: tf.Tensor) -> tf.Tensor:
        return tf.Variable(batch * 2.0).read_value()

    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)initial value.*depends on.*test_creation.py:\d+ in step_fn.*"
        r"Fix: pass a function without arguments",
    ):
        repl.run(step_fn, lambda: tf.data.Dataset.from_tensors(1.0).repeat())


def test_a_step_that_fails_can_be_corrected_and_run_again() -> None:
    repl = helpers.make(2)
    fail = True

    def step_fn() -> tf.Tensor:
        variable = tf.Variable(1.0)
        if fail and repl.replica_id == 1:
            raise KeyError("the user's own")
        return variable.assign_add(1.0).read_value()

    with pytest.raises(KeyError, match="the user's own"):
        repl.run(step_fn)
    fail = False
    assert [float(v) for v in repl.run(step_fn)] == [2.0, 2.0]
    assert not isinstance(tf.Variable(1.0), replicator.ReplicatedVariable)


@pytest.mark.parametrize("where", ["cond", "while", "function"])
def test_variables_made_inside_control_flow_live_outside_of_it(where: str) -> None:
    repl = helpers.make(2)
    variables: list[tf.Variable] = []

    @tf.function
    def nested() -> tf.Tensor:
        if not variables:
            variables.append(tf.Variable(3.0))
        return variables[0] * 2.0

    def step_fn() -> Any:
        chosen = tf.reduce_sum(tf.ones([2])) > 1.0
        if where == "cond":
            return tf.cond(chosen, lambda: tf.Variable(3.0) * 2.0, lambda: 0.0)
        if where == "while":
            body = tf.while_loop(
                lambda x: x < 1.0, lambda x: [tf.Variable(3.0) * 2.0], [0.0]
            )
            return body[0]
        return nested()

    for _ in range(2):
        np.testing.assert_array_equal(repl.run(step_fn), [6.0, 6.0])


def test_the_context_covers_its_block_only() -> None:
    repl = helpers.make(2)
    with pytest.raises(KeyError):
        with repl.context():
            inside = tf.Variable(1.0)
            with repl.context():
                nested = tf.Variable(1.0)
            raise KeyError
    outside = tf.Variable(1.0)
    kinds = [isinstance(v, replicator.ReplicatedVariable) for v in (inside, nested)]
    assert kinds == [True, True]
    assert not isinstance(outside, replicator.ReplicatedVariable)


@pytest.mark.parametrize("in_step", [True, False], ids=["in_step", "in_context"])
@pytest.mark.mirrored
def test_components_stand_on_the_devices(in_step: bool) -> None:
    repl = helpers.make(3)
    variables: list[Any] = []

    def create() -> None:
        with tf.device("CPU:5"):
            variables.append(tf.Variable([1.0], name="w"))

    if in_step:
        repl.run(create)
    else:
        with repl.context():
            create()
    devices = [component.device for component in variables[0].components]
    assert devices == list(repl.devices)
    names = [component.name for component in variables[0].components]
    assert names[0] == variables[0].name == "w:0" and len(set(names)) == 3


# --- tf.Graph and sessions -----------------------------------------------------------


def test_collections_hold_the_variable_once() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default(), repl.context():
        kept = v1.get_variable("kept", [2])
        frozen = tf.Variable(1.0, trainable=False)
        local = v1.get_variable("local", [], collections=["local_variables"])
        assert [v.name for v in v1.global_variables()] == [kept.name, frozen.name]
        assert v1.trainable_variables()[0] is kept
        assert kept.initial_value.shape == [2] and kept.graph is kept.op.graph
        assert v1.local_variables()[0] is local
        waiting = v1.report_uninitialized_variables()
        with v1.Session() as session:
            missing = [b"kept", b"Variable", b"local"]
            assert list(session.run(waiting)) == missing
            assert not session.run(kept.is_initialized())
            session.run(v1.global_variables_initializer())
            session.run(v1.local_variables_initializer())
            assert list(session.run(waiting)) == []
            first, second = session.run(list(kept.components))
        np.testing.assert_array_equal(first, second)
        assert first.std() > 0


def test_get_variable_finds_what_was_made_before() -> None:
    repl = helpers.make(2, build="trace")
    results: list[tf.Variable] = []

    def step_fn() -> tf.Tensor:
        with v1.variable_scope("model", reuse=v1.AUTO_REUSE):
            results.append(v1.get_variable("w", [], initializer=v1.ones_initializer()))
        return results[-1].assign_add(1.0).read_value()

    with tf.Graph().as_default():
        with repl.context(), v1.variable_scope("model"):
            outside = v1.get_variable("w", [], initializer=v1.ones_initializer())
        fetches = repl.run(step_fn)
        assert all(variable is outside for variable in results) and len(results) == 2
        with v1.train.MonitoredSession() as session:
            assert list(session.run(fetches)) == [2.0, 2.0]


def test_get_variable_without_reuse_makes_one_variable_in_a_step() -> None:
    repl = helpers.make(2)

    def step_fn() -> tf.Tensor:
        return v1.get_variable("w", [3]).read_value()

    with tf.Graph().as_default():
        fetches = repl.run(step_fn)
        assert len(v1.global_variables()) == 1
        with pytest.raises(ValueError, match="already exists"):
            repl.run(lambda: v1.get_variable("w", [3]))
        with v1.train.MonitoredSession() as session:
            np.testing.assert_array_equal(*session.run(fetches))


def test_meta_graphs_can_be_written() -> None:
    with tf.Graph().as_default(), helpers.make(2).context():
        v1.get_variable("w", [2])
        meta = v1.train.export_meta_graph()
    assert len(meta.collection_def["variables"].bytes_list.value) == 1


# --- Creators around the context ------------------------------------------------------


MAKERS: dict[str, Callable[[], Any]] = {
    "variable": lambda: tf.Variable(1.0, name="w"),
    "v1": lambda: v1.Variable(1.0, name="w", use_resource=True),
    "get_variable": lambda: v1.get_variable(
        "w", [], initializer=v1.ones_initializer(), use_resource=True
    ),
    "keras": lambda: tf.keras.Variable(1.0).value,
}


@pytest.mark.parametrize("in_step", [False, True], ids=["in_context", "in_step"])
@pytest.mark.parametrize(
    ("mode", "maker"),
    [
        (mode, maker)
        for mode in helpers.MODES
        for maker in MAKERS
        if maker == "variable" or mode == ("eager" if maker == "keras" else "session")
    ],
)
def test_what_creators_around_the_context_decide_counts(
    mode: str, maker: str, in_step: bool
) -> None:
    repl = helpers.make(2)
    seen: list[Any] = []
    names: list[str] = []

    def around(next_creator: Any, **kwargs: Any) -> Any:
        names.append("around")
        kwargs.update(trainable=False, initial_value=lambda: 3.0)
        kwargs.update(dtype=None, shape=None)
        seen.append(next_creator(**kwargs))
        return seen[-1]

    def inside(next_creator: Any, **kwargs: Any) -> Any:
        names.append("inside")
        return next_creator(**kwargs)

    def make() -> Any:
        with tf.variable_creator_scope(inside):
            return MAKERS[maker]()

    graph = tf.Graph().as_default() if mode == "session" else contextlib.nullcontext()
    with graph, tf.variable_creator_scope(around):
        with repl.context():
            outside = None if in_step else make()

        def step_fn() -> tf.Tensor:
            return (make() if in_step else outside).assign_add(1.0).read_value()

        if mode == "session":
            fetches = repl.run(step_fn)
            with v1.train.MonitoredSession() as session:
                result = session.run(fetches)
        elif mode == "function":
            result = tf.function(lambda: repl.run(step_fn))()
        else:
            result = repl.run(step_fn)
    assert list(result) == [4.0, 4.0]
    assert names[:2] == ["inside", "around"]
    (variable,) = {id(v): v for v in seen}.values()
    assert isinstance(variable, replicator.ReplicatedVariable)
    assert not variable.trainable
    if mode == "session":
        assert not variable.graph.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES)
    else:
        assert helpers.components(variable) == [4.0, 4.0]


def test_a_creator_around_the_context_may_return_something_else() -> None:
    repl = helpers.make(2)
    other = tf.constant(7.0)
    with (
        tf.variable_creator_scope(lambda next_creator, **_: other),
        repl.context(),
    ):
        result = tf.Variable(1.0)
    assert result is other


def test_a_partitioner_makes_replicated_parts() -> None:
    repl = helpers.make(2)
    frozen: list[Any] = []

    def freeze(next_creator: Any, **kwargs: Any) -> Any:
        frozen.append(next_creator(**{**kwargs, "trainable": False}))
        return frozen[-1]

    with tf.Graph().as_default(), tf.variable_creator_scope(freeze), repl.context():
        partitioner = tf.compat.v1.fixed_size_partitioner(2)
        with v1.variable_scope("p", partitioner=partitioner, use_resource=True):
            v1.get_variable("w", [4, 3])
        assert len(frozen) == 2 and not v1.trainable_variables()
        assert all(isinstance(v, replicator.ReplicatedVariable) for v in frozen)


def test_under_a_strategy_variables_are_the_replicators() -> None:
    repl = helpers.make(2)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope(), repl.context():
        variable = tf.Variable(1.0)
    assert isinstance(variable, replicator.ReplicatedVariable)
