# SPDX-License-Identifier: Apache-2.0
"""tf.distribute during a step: the context that other libraries' layers query."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests import helpers

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
VALUES = np.array([[1.0, 2.0], [5.0, 7.0], [-4.0, 3.0]], np.float32)


def own(repl: replicator.Replicator, values: Any = VALUES) -> tf.Tensor:
    """Returns the value of the replica being built."""
    return helpers.opaque(values[repl.replica_id])


def in_step(
    function: Callable[[Any, tf.Tensor], Any],
    mode: str = "eager",
    num_replicas: int = 3,
    values: Any = VALUES,
) -> Any:
    """Runs a step that calls `function` on the context and the replica's value."""
    repl = helpers.make(num_replicas)

    def step_fn() -> Any:
        return function(tf.distribute.get_replica_context(), own(repl, values))

    return helpers.run(mode, repl, lambda: step_fn)


# --- The replica's identity -----------------------------------------------------------


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_the_context_knows_the_replica(mode: str, num_replicas: int) -> None:
    repl = helpers.make(num_replicas)

    def step_fn() -> Any:
        context = tf.distribute.get_replica_context()
        assert context.num_replicas_in_sync == num_replicas
        assert tf.get_static_value(context.replica_id_in_sync_group) == repl.replica_id
        assert not tf.distribute.in_cross_replica_context()
        return context.replica_id_in_sync_group

    actual = helpers.run(mode, repl, lambda: step_fn)
    np.testing.assert_array_equal(actual, range(num_replicas))


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_the_strategy_knows_the_number_of_replicas(
    mode: str, num_replicas: int
) -> None:
    repl = helpers.make(num_replicas)
    outside = tf.distribute.get_strategy()

    def step_fn() -> tf.Tensor:
        assert not tf.distribute.has_strategy()
        strategy = tf.distribute.get_strategy()
        assert isinstance(strategy, tf.distribute.Strategy)
        assert strategy.num_replicas_in_sync == num_replicas
        assert tf.distribute.get_replica_context().strategy is strategy
        return tf.constant(0.0)

    helpers.run(mode, repl, lambda: step_fn)
    assert tf.distribute.get_strategy() is outside
    assert outside.num_replicas_in_sync == 1


@pytest.mark.parametrize("mode", helpers.MODES)
def test_to_keras_and_tensorflow_it_is_one_device(mode: str) -> None:
    """They would divide losses by the number of replicas, for optimizers that sum."""
    repl = helpers.make(2)
    metric = tf.keras.losses.MeanSquaredError()

    def step_fn() -> Any:
        average = tf.nn.compute_average_loss(tf.constant([1.0, 3.0]))
        loss = metric(tf.zeros([2, 1]), tf.ones([2, 1]))
        return average, loss, tf.nn.scale_regularization_loss(tf.constant(4.0))

    actual = helpers.run(mode, repl, lambda: step_fn)
    assert [[float(v) for v in values] for values in actual] == [[2, 2], [1, 1], [4, 4]]


LOOPS = ["fit", "evaluate", "predict"]
LOOPS += ["train_on_batch", "test_on_batch", "predict_on_batch"]


@pytest.mark.battery(5)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("before", [False, True], ids=["new", "run before"])
def test_a_loop_of_keras_in_a_step_is_refused(
    mode: str, loop: str, before: bool
) -> None:
    repl = helpers.make(2)
    x, y = np.ones([4, 2], np.float32), np.ones([4, 1], np.float32)
    batch = [x] if loop.startswith("predict") else [x, y]
    with repl.context():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.build([None, 2])
    verbose = {} if loop.endswith("batch") else {"verbose": 0}
    if before:
        getattr(model, loop)(*batch, **verbose)

    def step_fn() -> None:
        getattr(model, loop)(*batch, **verbose)

    with pytest.raises(
        errors.ContextError,
        match=r"(?s)loop of Keras \(fit, .* was called on replica 0 in a step.*"
        r"test_distribute\.py:\d+ in step_fn.*Fix: in step_fn, call",
    ):
        helpers.run(mode, repl, lambda: step_fn)
    getattr(model, loop)(*batch, **verbose)  # outside it works as before


def _under_a_strategy(repl: Any, what: str) -> Any:
    if what == "context":
        with repl.context():
            return tf.Variable(1.0)
    if what == "run in a function":
        return tf.function(lambda: repl.run(lambda: tf.constant(1)))()
    return repl.run(lambda: tf.constant(1))


@pytest.mark.parametrize("what", ["context", "run", "run in a function"])
def test_a_replicator_under_a_strategy_is_refused(what: str) -> None:
    repl = helpers.make(2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    message = (
        rf"(?s){what[:3]}.* of a Replicator was called under a MirroredStrategy.*"
        r"test_distribute\.py:\d+ in .*Fix: leave the strategy's scope"
    )
    with strategy.scope(), pytest.raises(errors.ContextError, match=message):
        _under_a_strategy(repl, what)
    with pytest.raises(errors.ContextError, match=message):
        strategy.run(_under_a_strategy, (repl, what))
    _under_a_strategy(repl, what)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        _under_a_strategy(repl, what)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("in_graph", [False, True])
def test_outside_of_a_step_nothing_changes(fails: bool, in_graph: bool) -> None:
    repl = helpers.make(2)

    def step_fn() -> tf.Tensor:
        if fails:
            raise ZeroDivisionError
        return tf.constant(0.0)

    def run_and_look() -> None:
        before = tf.distribute.get_replica_context()
        try:
            repl.run(step_fn)
        except ZeroDivisionError:
            assert fails
        assert tf.distribute.get_replica_context() is before

    if in_graph:
        with tf.Graph().as_default():
            run_and_look()
    else:
        run_and_look()
        tf.function(run_and_look)()


@tf.function
def _shared_by_replicas(x: tf.Tensor) -> Any:
    context = tf.distribute.get_replica_context()
    return context.replica_id_in_sync_group, context.all_reduce("SUM", x)


def in_function(context: Any, x: tf.Tensor) -> Any:
    return _shared_by_replicas(x)


def in_loop(context: Any, x: tf.Tensor) -> Any:
    def body(turn: tf.Tensor, total: tf.Tensor) -> Any:
        inside = tf.distribute.get_replica_context()
        assert inside is context
        return turn + 1, total + inside.all_reduce("SUM", x) / 2

    return (
        context.replica_id_in_sync_group,
        tf.while_loop(lambda turn, total: turn < 2, body, (0, tf.zeros_like(x)))[1],
    )


@pytest.mark.battery(5)
@pytest.mark.parametrize("place", [in_function, in_loop])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_functions_and_loops_inside_see_the_context(place: Any, mode: str) -> None:
    ids, sums = in_step(place, mode)
    np.testing.assert_array_equal(ids, [0, 1, 2])
    for result in sums:
        np.testing.assert_allclose(result, VALUES.sum(0))


# --- Communication --------------------------------------------------------------------


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("op", [SUM, MEAN, "SUM", "mean"], ids=str)
def test_all_reduce(mode: str, op: Any) -> None:
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=8)

    def function(context: Any, x: tf.Tensor) -> Any:
        nest = {"a": [x], "b": tf.reduce_sum(x)}
        return context.all_reduce(op, nest, options=options)

    results = in_step(function, mode)
    total = VALUES.sum(0) if op in (SUM, "SUM") else VALUES.mean(0)
    for r in range(3):
        np.testing.assert_allclose(results["a"][0][r], total, rtol=1e-6)
        np.testing.assert_allclose(results["b"][r], total.sum(), rtol=1e-6)


@pytest.mark.parametrize("op", [SUM, MEAN], ids=str)
def test_the_gradient_of_all_reduce_is_that_of_tf_distribute(op: Any) -> None:
    """An all-sum's gradient is itself an all-sum, likewise for the mean."""

    def function(context: Any, x: tf.Tensor) -> Any:
        factor = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = factor * tf.reduce_sum(context.all_reduce(op, x) ** 2)
        return tape.gradient(loss, x)

    total = VALUES.sum(0) if op == SUM else VALUES.mean(0)
    expected = 2 * total * (1 + 2 + 3) / (1 if op == SUM else 3)
    for gradient in in_step(function):
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_all_reduce_keeps_slices_sparse() -> None:
    def function(context: Any, x: tf.Tensor) -> Any:
        row = context.replica_id_in_sync_group
        rows = tf.IndexedSlices(x[tf.newaxis], row[tf.newaxis], [3])
        reduced = context.all_reduce(SUM, rows)
        assert isinstance(reduced, tf.IndexedSlices)
        return reduced.values

    for values in in_step(function):
        np.testing.assert_array_equal(values, VALUES)


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("axis", [0, -1, tf.constant(0)], ids=["0", "-1", "tensor"])
def test_all_gather_of_uneven_values(mode: str, axis: Any) -> None:
    axis = 0 if tf.is_tensor(axis) and mode == "session" else axis
    values = [np.arange(n, dtype=np.float32) for n in (2, 0, 3)]
    repl = helpers.make(3)

    def step_fn() -> Any:
        context = tf.distribute.get_replica_context()
        x = helpers.opaque(values[repl.replica_id], [None])
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = context.all_gather(x, axis)
            loss = tf.reduce_sum(gathered**2)
        return gathered, tape.gradient(loss, x)

    gathered, gradients = helpers.run(mode, repl, lambda: step_fn)
    for result, gradient, value in zip(gathered, gradients, values, strict=True):
        np.testing.assert_array_equal(result, np.concatenate(values))
        np.testing.assert_array_equal(gradient, 3 * 2 * value)


# --- merge_call -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_merge_fn_reduces_and_gathers(mode: str, num_replicas: int) -> None:
    values = VALUES[:num_replicas]

    def merge_fn(strategy: Any, x: tf.Tensor, y: tf.Tensor) -> Any:
        assert tf.distribute.in_cross_replica_context()
        assert tf.distribute.get_replica_context() is None
        assert strategy.num_replicas_in_sync == num_replicas
        local = strategy.experimental_local_results(x)
        assert len(local) == num_replicas
        return {
            "reduce": strategy.reduce("MEAN", x, axis=None),
            "reduce_to": strategy.extended.reduce_to(SUM, x, destinations=x),
            "batch": strategy.extended.batch_reduce_to(SUM, [(x, x), (y, y)])[1],
            "gather": strategy.gather(x, axis=0),
            "local": tf.stack(local),
        }

    def function(context: Any, x: tf.Tensor) -> Any:
        merged = context.merge_call(merge_fn, args=(x,), kwargs={"y": 2 * x})
        assert tf.distribute.get_replica_context() is context
        return merged

    results = in_step(function, mode, num_replicas, values)
    expected = {
        "reduce": values.mean(0),
        "reduce_to": values.sum(0),
        "batch": 2 * values.sum(0),
        "gather": values.reshape(-1),
        "local": values,
    }
    for name, value in expected.items():
        for result in results[name]:
            np.testing.assert_allclose(result, value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("op", [SUM, MEAN], ids=str)
def test_reducing_over_an_axis_counts_every_element_once(op: Any) -> None:
    values = [np.ones([2, 2], np.float32), np.full([1, 2], 4.0, np.float32)]
    repl = helpers.make(2)

    def step_fn() -> Any:
        x = helpers.opaque(values[repl.replica_id], [None, 2])
        context = tf.distribute.get_replica_context()
        return context.merge_call(lambda s, x: s.reduce(op, x, axis=0), args=(x,))

    expected = np.concatenate(values).sum(0) / (1 if op == SUM else 3)
    for result in repl.run(step_fn):
        np.testing.assert_allclose(result, expected)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_merge_fn_updates_variables(mode: str) -> None:
    repl = helpers.make(3)
    made = []

    def make_step() -> Callable[[], tf.Tensor]:
        variable = tf.Variable([1.0, 1.0])
        made.append(variable)

        def merge_fn(strategy: Any, value: tf.Tensor) -> Any:
            value = strategy.extended.reduce_to(SUM, value, variable)
            return strategy.extended.update(
                variable, lambda v, x: v.assign_add(x), args=(value,)
            )

        def step_fn() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            context.merge_call(merge_fn, args=(own(repl),))
            return variable.read_value()

        return step_fn

    for result in helpers.run(mode, repl, make_step):
        np.testing.assert_allclose(result, 1 + VALUES.sum(0), rtol=1e-6)
    if mode != "session":
        helpers.assert_replicas_equal(made)


def test_an_ungrouped_update_is_a_list() -> None:
    def merge_fn(strategy: Any, x: tf.Tensor) -> Any:
        (updated,) = strategy.extended.update(x, lambda v: v + 1, group=False)
        return updated

    results = in_step(lambda context, x: context.merge_call(merge_fn, args=(x,)))
    np.testing.assert_array_equal(results, VALUES + 1)


@pytest.mark.parametrize("call", ["run", "call_for_each_replica"])
def test_a_merge_fn_goes_back_into_the_replicas(call: str) -> None:
    def function(context: Any, x: tf.Tensor) -> Any:
        def inside(x: tf.Tensor, factor: float) -> tf.Tensor:
            assert tf.distribute.get_replica_context() is context
            return context.all_reduce("SUM", x) * factor

        def merge_fn(strategy: Any, x: tf.Tensor) -> Any:
            owner = strategy if call == "run" else strategy.extended
            return getattr(owner, call)(inside, args=(x,), kwargs={"factor": 2.0})

        return context.merge_call(merge_fn, args=(x,))

    for result in in_step(function):
        np.testing.assert_allclose(result, 2 * VALUES.sum(0))


def test_autograph_converts_a_merge_fn() -> None:
    def merge_fn(strategy: Any, x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 5.0:
            x = -x
        return x

    results = in_step(lambda context, x: context.merge_call(merge_fn, args=(x,)))
    np.testing.assert_array_equal(results, [VALUES[0], -VALUES[1], VALUES[2]])


@pytest.mark.parametrize("mode", helpers.MODES)
def test_moving_averages_of_tensorflow_take_the_mean(mode: str) -> None:
    """They call merge_call, and reduce and update in it."""
    repl = helpers.make(3)

    def make_step() -> Callable[[], tf.Tensor]:
        variable = tf.Variable([0.0, 0.0])
        average = tf.train.ExponentialMovingAverage(decay=0.75)

        def step_fn() -> tf.Tensor:
            with tf.control_dependencies([variable.assign(own(repl))]):
                with tf.control_dependencies([average.apply([variable])]):
                    return average.average(variable).read_value()

        return step_fn

    for result in helpers.run(mode, repl, make_step):
        np.testing.assert_allclose(result, 0.25 * VALUES.mean(0), rtol=1e-6)


# --- Errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda context: context.all_reduce("SUM", 1.0), "all_reduce"),
        (lambda context: context.all_gather([1.0], axis=0), "all_gather"),
        (lambda context: context.merge_call(lambda strategy: 0.0), "merge_call"),
    ],
    ids=["all_reduce", "all_gather", "merge_call"],
)
def test_a_context_that_was_kept_is_of_no_use_later(call: Any, what: str) -> None:
    kept = []
    in_step(lambda context, x: (kept.append(context), x)[1])
    with pytest.raises(
        replicator.ContextError, match=f"{what} was called outside a step"
    ):
        call(kept[0])


@pytest.mark.parametrize("op", ["max", None, 3])
def test_only_sums_and_means(op: Any) -> None:
    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)all_reduce on replica 0 was given reduce_op={op!r}\..*"
        r'test_distribute.py:\d+.*Fix: reduce_op is "SUM" or "MEAN"',
    ):
        in_step(lambda context, x: context.all_reduce(op, x))


@pytest.mark.parametrize(
    "ask",
    [
        lambda strategy: strategy.scope(),
        lambda strategy: strategy.experimental_distribute_dataset(None),
        lambda strategy: strategy.extended.parameter_devices,
    ],
    ids=["scope", "dataset", "devices"],
)
def test_a_merge_fn_that_wants_more_is_told_what_there_is(ask: Any) -> None:
    repl = helpers.make(3)

    def step_fn() -> Any:
        context = tf.distribute.get_replica_context()
        return context.merge_call(ask)

    with pytest.raises(
        replicator.ReplicatorError,
        match=r"(?s)a merge_fn asks tf.distribute for \w+, which has no meaning in a "
        r"step.*test_distribute.py:\d+.*Fix: a merge_fn can reduce, gather and update",
    ):
        repl.run(step_fn)


def test_replicas_that_differ_in_what_a_layer_communicates_are_told() -> None:
    repl = helpers.make(2)

    def step_fn() -> Any:
        context = tf.distribute.get_replica_context()
        if repl.replica_id:
            return context.all_gather(tf.zeros([2]), axis=0)
        return context.all_reduce("SUM", tf.zeros([2]))

    with pytest.raises(
        replicator.MismatchError, match="(?s)replica 0.*all_reduce.*replica 1.*gather"
    ):
        repl.run(step_fn)


def _models_copies() -> Any:
    """Returns uses of objects made by a strategy of two replicas, by name."""
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.layers.Dense(2)])
        model.build([None, 3])
        v = tf.Variable(1.0)
    return {
        "model": lambda: model(tf.ones([1, 3])),
        "read": lambda: v + 1.0,
        "assigned": lambda: v.assign(2.0),
    }


@pytest.mark.parametrize("what", ["model", "read", "assigned"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_the_copies_of_a_strategy_are_refused(what: str, replicas: int) -> None:
    """Even if each replica has one: nothing of ours keeps them equal."""
    repl, use = helpers.make(replicas), _models_copies()[what]
    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)replica 0 uses .*created under a tf.distribute strategy.*copies.*"
        r"test_distribute.py:\d+.*Fix: .*repl.context\(\)",
    ):
        repl.run(lambda: use())
