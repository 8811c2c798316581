# SPDX-License-Identifier: Apache-2.0
"""Several steps in one call equal as many calls, whatever the step does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

COUNT = 3  # steps per call


def _training(repl: replicator.Replicator) -> tuple[Callable[..., Any], Any]:
    """Returns a step that trains with dropout, and the variables that it changes."""
    tf.keras.utils.set_random_seed(1)
    with repl.context():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((4,)),
                tf.keras.layers.Dense(8, "relu"),
                tf.keras.layers.BatchNormalization(),
                tf.keras.layers.Dropout(0.5),
                tf.keras.layers.Dense(1),
            ]
        )
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.1))

    def step_fn(examples: tf.Tensor) -> dict[str, Any]:
        calls = tf.Variable(0, dtype=tf.int64)  # made in the step
        with tf.GradientTape() as tape:
            noisy = examples + tf.random.normal(tf.shape(examples))
            loss = tf.reduce_mean(model(noisy, training=True) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables, strict=True)
        )
        return {
            "loss": repl.all_reduce(loss, "mean"),
            "own": [loss, examples],
            "calls": calls.assign_add(1),
        }

    return step_fn, lambda: [*model.variables, *optimizer.variables]


def _input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
    values = np.random.default_rng(ctx.replica_id).standard_normal((36, 4))
    return tf.data.Dataset.from_tensor_slices(values.astype(np.float32)).batch(4)


def _train(mode: str, steps_per_call: int) -> tuple[list[Any], list[np.ndarray]]:
    """Takes six steps; returns all steps' values of each leaf, and the weights."""
    # Grappler gathers factors out of a ring's sums, but not in a loop: the last bit.
    repl = helpers.make(2, algorithm=None)
    step_fn, variables = _training(repl)
    call = repl.build(step_fn, _input_fn, steps_per_call=steps_per_call)
    call = tf.function(call) if mode == "function" else call
    results = [call() for _ in range(6 // steps_per_call)]
    join = np.stack if steps_per_call == 1 else np.concatenate
    columns = zip(*map(tf.nest.flatten, results), strict=True)
    helpers.assert_replicas_equal(v for v in variables() if "seed" not in v.name)
    weights = [part for v in variables() for part in helpers.components(v)]
    return [join([np.asarray(v) for v in column]) for column in columns], weights


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_one_call_of_several_steps_equals_several_calls(mode: str) -> None:
    single, expected = _train(mode, 1)
    several, weights = _train(mode, COUNT)
    assert len(single) == 8  # four leaves on two replicas
    for one, other in zip(single, several, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(expected, weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_results_are_stacked_at_each_leaf(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        count = tf.Variable(0)

        def step_fn() -> Any:
            now = tf.convert_to_tensor(count.assign_add(1)) + 10 * repl.replica_id
            return {
                "count": (now, tf.strings.as_string(now)),
                "vector": tf.fill([2], now),
                "unknown": tf.fill(helpers.opaque([2]), now),
                "constant": 7,
            }

        return step_fn

    result = _run(mode, repl, make_step)
    assert set(result) == {"count", "vector", "unknown", "constant"}
    for r in range(2):
        now = np.arange(1, 1 + COUNT) + 10 * r
        np.testing.assert_array_equal(result["count"][0][r], now)
        assert [text.decode() for text in result["count"][1][r]] == [*map(str, now)]
        np.testing.assert_array_equal(result["vector"][r], np.stack([now, now], 1))
        np.testing.assert_array_equal(result["unknown"][r], np.stack([now, now], 1))
        np.testing.assert_array_equal(result["constant"][r], [7] * COUNT)


def _run(mode: str, repl: replicator.Replicator, make_step: Any) -> Any:
    """Runs one call in one of the modes; returns NumPy arrays."""
    options = {"steps_per_call": COUNT}
    if mode == "session":
        with tf.Graph().as_default():
            with repl.context():
                step_fn = make_step()
            fetches = repl.run(step_fn, **options)
            with tf.compat.v1.train.MonitoredSession() as session:
                return session.run(fetches)
    with repl.context():
        step_fn = make_step()
    call: Any = repl.build(step_fn, **options)
    result = (tf.function(call) if mode == "function" else call)()
    return tf.nest.map_structure(lambda t: t.numpy() if t is not None else t, result)


def test_a_session_runs_the_same_steps_whatever_is_fetched() -> None:
    def train(steps_per_call: int) -> tuple[list[float], list[np.ndarray]]:
        repl = helpers.make(2)
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            with repl.context():
                weight = tf.Variable([1.0, -1.0, 0.5, 2.0])

            def step_fn(examples: tf.Tensor) -> tuple[Any, Any]:
                total = tf.Variable(0.0)  # made in the step
                error = repl.all_reduce(tf.tensordot(examples, weight, 1), "mean")
                weight.assign_sub(0.1 * repl.all_reduce(tf.reduce_mean(examples, 0)))
                total.assign_add(repl.all_reduce(tf.norm(error)))
                return error, total.read_value()

            fetches = repl.run(step_fn, _input_fn, steps_per_call=steps_per_call)
            session.run(tf.compat.v1.global_variables_initializer())
            repl.initialize(session)
            losses: list[float] = []
            for _ in range(6 // steps_per_call):
                losses += np.ravel(session.run(fetches[1][0])).tolist()
            parts = [session.run(component) for component in weight.components]
            return losses, parts

    expected, weights = train(1)
    losses, others = train(COUNT)
    assert len(expected) == 6
    assert losses == expected
    np.testing.assert_array_equal(weights, others)


@pytest.mark.parametrize("returned", [lambda: None, tf.no_op], ids=["None", "an op"])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_steps_that_return_nothing_run_all_the_same(mode: str, returned: Any) -> None:
    repl = helpers.make(2)
    ran: list[int] = []

    def step_fn() -> Any:
        tf.py_function(lambda: ran.append(1), [], [])
        return returned()

    assert [*_run(mode, repl, lambda: step_fn)] == [None, None]
    assert len(ran) == 2 * COUNT


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_the_steps_before_the_end_of_the_inputs_are_done_whole(mode: str) -> None:
    """Even if one device is slower than the one that reaches the end."""
    repl = helpers.make(3)
    with repl.context():
        early, late = tf.Variable(0), tf.Variable(tf.zeros([64, 64]))

    def step_fn(element: tf.Tensor) -> Any:
        early.assign_add(1)
        value = tf.cast(element, tf.float32) * 0.0 + tf.eye(64)
        for _ in range(20 * repl.replica_id):
            value = value @ tf.eye(64)
        late.assign_add(value, read_value=False)
        return repl.all_reduce(tf.cast(element, tf.float32))

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.range((8, 9, 8)[ctx.replica_id])

    step = repl.build(step_fn, input_fn, steps_per_call=COUNT)
    call: Any = tf.function(step) if mode == "function" else step
    for epoch in range(1, 11):
        for _ in range(2):
            assert call()[0].shape == [COUNT]
        for _ in range(2):
            with pytest.raises(tf.errors.OutOfRangeError):
                call()
            assert [int(c) for c in helpers.components(early)] == [8 * epoch] * 3
            for component in helpers.components(late):
                np.testing.assert_array_equal(component, np.eye(64) * 8 * epoch)
        step.initialize()


UNSTACKABLE = {
    "sparse": lambda: tf.sparse.eye(2),
    "ragged": lambda: tf.ragged.constant([[1], [2, 3]]),
    "slices": lambda: tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1])),
}


@pytest.mark.parametrize("make", UNSTACKABLE.values(), ids=UNSTACKABLE)
@pytest.mark.parametrize("mode", helpers.MODES)
def test_what_cannot_be_stacked_is_refused(mode: str, make: Any) -> None:
    repl = helpers.make(2)
    with pytest.raises(
        replicator.ReplicatorError,
        match="(?s)cannot be stacked.*Fix: with steps_per_call",
    ):
        _run(mode, repl, lambda: make)


def test_shapes_that_change_from_step_to_step_fail_in_the_call() -> None:
    repl = helpers.make(2)
    with repl.context():
        count = tf.Variable(0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="(?i)shape"):
        repl.run(lambda: tf.zeros([count.assign_add(1)]), steps_per_call=2)


def test_no_gradient_passes() -> None:
    repl = helpers.make(2)
    with repl.context():
        weight = tf.Variable(3.0)
    step = repl.build(lambda: weight * weight, steps_per_call=2)

    @tf.function
    def around() -> Any:
        with tf.GradientTape() as tape:
            value = step()[0]
        return tape.gradient(value, weight), tf.gradients(value, weight.components[0])

    assert around() == (None, [None])


def test_steps_of_other_counts_are_other_steps() -> None:
    repl = helpers.make(2)

    def step_fn() -> Any:
        return repl.all_reduce(helpers.opaque(1.0))

    one, two = repl.build(step_fn), repl.build(step_fn, steps_per_call=2)
    assert one is not two is repl.build(step_fn, steps_per_call=2)
    assert [row.primitive for row in two.plan] == ["all_reduce"]  # of one step
    assert (one()[0].shape, two()[0].shape) == ([], [2])


@pytest.mark.parametrize("count", [0, -1, 1.5, True, None, "2"], ids=repr)
def test_bad_numbers_of_steps_are_refused(count: Any) -> None:
    repl = helpers.make(2)
    with pytest.raises(
        replicator.ReplicatorError,
        match=rf"(?s)steps_per_call={count!r}.*test_loops\.py.*Fix: .*positive int",
    ) as caught:
        repl.run(lambda: tf.constant(1), steps_per_call=count)
    assert isinstance(caught.value, ValueError)
