# SPDX-License-Identifier: Apache-2.0
"""accumulation_steps: several steps, one combination, one update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf

import replicator
from tests import helpers
from tests.optimizers import problem

v1 = tf.compat.v1
kopt = tf.keras.optimizers

MAKERS = {
    "keras": (problem.KERAS, lambda: kopt.Adam(0.25, global_clipnorm=0.5)),
    "keras_pairs": (problem.KERAS_PAIRS, lambda: kopt.SGD(0.25, momentum=0.5)),
    "v1": (problem.V1, lambda: v1.train.AdamOptimizer(0.25)),
    "sonnet": (problem.SONNET, lambda: snt.optimizers.Adam(0.25)),
}


def _split(batch: problem.Batch, parts: int) -> list[problem.Batch]:
    indices, targets = (np.split(part, parts) for part in batch)
    return list(zip(indices, targets, strict=True))


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", MAKERS)
def test_four_steps_of_16_equal_one_of_64(name: str, mode: str) -> None:
    """Gradients are sparse too; the optimizer, clipping included, sees the mean."""
    family, make = MAKERS[name]
    whole = problem.batches(2, examples=64)
    parts = [part for batch in whole for part in _split(batch, 4)]
    actual = problem.train(
        helpers.make(2), family, make, parts, mode, accumulation_steps=4
    )
    problem.assert_close(actual, problem.train_plain(family, make, whole))


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_op_is_over_the_replicas_the_mean_over_the_steps(op: str) -> None:
    repl, optimizer, w = problem.wrapped(
        lambda: kopt.SGD(1.0), 0.0, op=op, accumulation_steps=2
    )
    for factor in (1.0, 3.0):
        gradient = tf.constant(factor)
        repl.run(lambda g=gradient: optimizer.apply([g * (1 + repl.replica_id)], [w]))
    total = (1 + 2) * (1 + 3) / 2
    assert w.numpy() == -(total if op == "sum" else total / 2)


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_nothing_changes_in_between(mode: str) -> None:
    repl, optimizer, w, table = problem.wrapped(
        lambda: kopt.Adam(0.1, weight_decay=0.1),
        1.0,
        tf.ones([3, 2]),
        accumulation_steps=3,
    )

    def step_fn() -> None:
        with tf.GradientTape() as tape:
            loss = w * w + tf.reduce_sum(tf.gather(table, [repl.replica_id, 1]))
        optimizer.apply(tape.gradient(loss, [w, table]), [w, table])

    call = repl.build(step_fn)
    if mode == "function":
        call = tf.function(lambda: repl.run(step_fn))
    call()
    state = [w, table, *optimizer.variables]
    before = [each.numpy().tobytes() for each in state]
    for step in range(2, 8):
        call()
        after = [each.numpy().tobytes() for each in state]
        assert (after == before) == (step % 3 != 0), step
        assert optimizer.iterations.numpy() == step // 3
        helpers.assert_replicas_equal(state)
        before = after


def test_global_step_counts_updates() -> None:
    repl = helpers.make(2)

    def make_step() -> Any:
        with repl.context():
            w = tf.Variable(1.0)
            step = tf.Variable(0, dtype=tf.int64, trainable=False)
            optimizer = repl.wrap_optimizer(
                v1.train.MomentumOptimizer(1.0, 0.5), accumulation_steps=2
            )

        def step_fn() -> Any:
            update = optimizer.apply_gradients(
                [(tf.constant(1.0), w)], global_step=step
            )
            with tf.control_dependencies([update]):
                return w.read_value(), step.read_value()

        return step_fn

    for mode in helpers.MODES:
        w, step = helpers.run(mode, repl, make_step, steps=5)
        assert list(step) == [2, 2], mode
        assert list(w) == [1.0 - 1.0 - 1.5] * 2, mode


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", ["keras", "v1", "sonnet"])
def test_weights_count_over_steps_and_replicas(name: str) -> None:
    """Five examples, in 2 steps on 2 replicas, equal five at once."""
    family, make = MAKERS[name]
    (batch,) = problem.batches(1, examples=5)
    shares = [[slice(0, 2), slice(2, 3)], [slice(3, 3), slice(3, 5)]]  # [step][replica]
    repl = helpers.make(2)
    with repl.context():
        parameters = family.variables()
        optimizer = repl.wrap_optimizer(make(), accumulation_steps=2)

    def step_of(shares: Sequence[slice]) -> Any:
        def step_fn() -> None:
            share = shares[repl.replica_id]
            indices, targets = (tf.constant(part[share]) for part in batch)
            _, grads = problem.gradients(parameters, indices, targets)
            family.apply(optimizer, grads, parameters, weight=len(batch[0][share]))

        return step_fn

    # Two steps of different code: they share their sums, and their weights.
    steps = [step_of(share) for share in shares]
    for _ in range(2):
        for step_fn in steps:
            repl.run(step_fn)
    helpers.assert_replicas_equal(parameters)
    expected = problem.train_plain(family, make, [batch, batch])
    problem.assert_close([p.numpy() for p in parameters], expected)


def test_all_empty_changes_nothing_but_momentum() -> None:
    repl, optimizer, w = problem.wrapped(
        lambda: kopt.SGD(1.0), 1.0, accumulation_steps=2
    )
    nan = tf.constant(float("nan"))
    for _ in range(4):
        repl.run(lambda: optimizer.apply([nan], [w], weight=0))
    assert w.numpy() == 1.0
    assert optimizer.iterations.numpy() == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_gradients_are_added_up_in_float32(dtype: str) -> None:
    """The sums exceed the range of 16 bits; their means do not."""
    repl, optimizer, w = problem.wrapped(
        lambda: snt.optimizers.SGD(1.0), tf.zeros([], dtype), accumulation_steps=4
    )
    gradient = tf.constant(40000.0, dtype)
    for _ in range(4):
        repl.run(lambda: optimizer.apply([gradient], [w], weight=1000))
    np.testing.assert_array_equal(-w.numpy(), gradient.numpy())


def test_steps_over_different_variables_do_not_mix() -> None:
    """One optimizer, two alternating steps: each set of gradients has its own count."""
    repl, optimizer, a, b = problem.wrapped(
        lambda: snt.optimizers.SGD(1.0), 0.0, 0.0, accumulation_steps=2
    )
    one, ten = tf.constant(1.0), tf.constant(10.0)
    seen = []
    for _ in range(4):
        repl.run(lambda: optimizer.apply([one], [a]))
        repl.run(lambda: optimizer.apply([ten, ten], [a, b]))
        seen.append((a.numpy(), b.numpy()))
    assert seen == [(0, 0), (-11, -10), (-11, -10), (-22, -20)]


def test_dense_and_sparse_gradients_of_one_variable() -> None:
    repl, optimizer, table = problem.wrapped(
        lambda: kopt.SGD(1.0), tf.zeros([2, 1]), accumulation_steps=2
    )
    dense = tf.ones([2, 1])

    def sparse() -> tf.IndexedSlices:
        return tf.IndexedSlices(4 * tf.ones([1, 1]), tf.constant([1]), [2, 1])

    for _ in range(2):
        repl.run(lambda: optimizer.apply([dense], [table]))
        repl.run(lambda: optimizer.apply([sparse()], [table]))
    np.testing.assert_array_equal(table.numpy(), [[-1.0], [-5.0]])


@pytest.mark.parametrize("bad_step", [None, 1], ids=["finite", "inf"])
def test_with_loss_scale(bad_step: int | None) -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0)
        optimizer = repl.wrap_optimizer(
            kopt.LossScaleOptimizer(
                kopt.SGD(0.5), initial_scale=4.0, dynamic_growth_steps=2
            ),
            accumulation_steps=2,
        )
        turn = tf.Variable(0)

    def step_fn() -> None:
        bad = tf.equal(turn, -1 if bad_step is None else bad_step)
        factor = tf.where(bad, float("inf") if repl.replica_id else 1.0, 1.0)
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(w * factor)
        optimizer.apply([tape.gradient(scaled, w)], [w])
        turn.assign_add(1)

    seen = []
    for _ in range(4):
        repl.run(step_fn)
        seen.append((w.numpy(), optimizer.dynamic_scale.numpy()))
    if bad_step is None:
        assert seen == [(1, 4), (0.5, 4), (0.5, 4), (0, 8)]
    else:
        assert seen == [(1, 4), (1, 2), (1, 2), (0.5, 2)]
    helpers.assert_replicas_equal([w, *optimizer.variables])


def test_unused_on_some_replicas() -> None:
    repl, optimizer, a, b = problem.wrapped(
        lambda: kopt.SGD(1.0, momentum=0.5), 0.0, 0.0, accumulation_steps=2
    )

    def step_fn() -> None:
        grads = [tf.constant(4.0) if repl.replica_id else None, None]
        optimizer.apply(grads, [a, b])

    for _ in range(4):
        repl.run(step_fn)
    assert (a.numpy(), b.numpy()) == (-2.0 - 3.0, 0.0)


def test_outside_a_step_is_refused() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(0.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0), accumulation_steps=2)
        weighted = repl.wrap_optimizer(kopt.SGD(1.0))
    one = tf.constant(1.0)
    with pytest.raises(replicator.ContextError, match="accumulating.*outside a step"):
        optimizer.apply([one], [w])
    with pytest.raises(replicator.ContextError, match="weighted.*outside a step"):
        weighted.apply([one], [w], weight=2)
    assert w.numpy() == 0.0


@pytest.mark.parametrize("shape", [None, [None]])
def test_shapes_that_may_change_are_refused(shape: list[None] | None) -> None:
    repl = helpers.make(2)
    with repl.context():
        v = tf.Variable([1.0, 2.0], shape=tf.TensorShape(shape))
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.SGD(0.1), accumulation_steps=2
        )

    def step_fn() -> None:
        optimizer.apply_gradients([(v + 1.0, v)])

    with pytest.raises(replicator.ArgumentError, match="(?s)shape .*step_fn.*Fix: "):
        repl.run(step_fn)


def test_gradients_have_their_variables_static_shape() -> None:
    repl, optimizer, v = problem.wrapped(
        lambda: tf.keras.optimizers.SGD(1.0),
        [1.0, 2.0],
        accumulation_steps=2,
        compressor="ef(topk)",
    )

    def step_fn() -> None:
        gradient = tf.raw_ops.PlaceholderWithDefault(input=tf.ones([2]), shape=None)
        optimizer.apply_gradients([(gradient, v)])

    for _ in range(2):
        repl.run(step_fn)
    np.testing.assert_array_equal(v, [0.0, 2.0])


@pytest.mark.parametrize("name", MAKERS)
def test_uneven_shards_of_float64_are_exact(name: str) -> None:
    """Weights are added up in the precision of the gradients."""
    random = np.random.RandomState(0)
    x, start = random.rand(7, 2), random.rand(2)
    repl = helpers.make(3)
    make = {
        "keras": lambda: kopt.SGD(0.5),
        "keras_pairs": lambda: kopt.SGD(0.5, momentum=0.5),
        "v1": lambda: v1.train.GradientDescentOptimizer(0.5),
        "sonnet": lambda: snt.optimizers.SGD(0.5),
    }[name]

    def update(optimizer: Any, w: Any, x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.linalg.matvec(x, w)) ** 2)
        grads = tape.gradient(loss, [w])
        if name == "sonnet":
            optimizer.apply(grads, [w])
        else:
            optimizer.apply_gradients(zip(grads, [w], strict=True))

    with repl.context():
        w = tf.Variable(start)
        optimizer = repl.wrap_optimizer(make(), accumulation_steps=2)
    batches = tf.data.Dataset.from_tensors(x).repeat(8)

    def step(x: tf.Tensor) -> None:
        update(optimizer, w, x)

    for _ in range(4):
        repl.run(step, batches, input_mode="global_batch")
    alone, plain = tf.Variable(start), make()
    for _ in range(2):
        update(plain, alone, tf.constant(x))
    np.testing.assert_allclose(w, alone, rtol=1e-14)
