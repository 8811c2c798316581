# SPDX-License-Identifier: Apache-2.0
"""Wrapped optimizers of all families, with compressors."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf

import replicator
from replicator import compressors, strategy
from replicator.strategy import AllReduceSynchronizer
from tests import helpers, paper_hosts
from tests.optimizers import problem

kopt = tf.keras.optimizers
MAKERS = {
    "keras": (problem.KERAS, lambda: kopt.Adam(0.25, global_clipnorm=0.5)),
    "v1": (problem.V1, lambda: tf.compat.v1.train.AdagradOptimizer(0.25)),
    "sonnet": (problem.SONNET, lambda: snt.optimizers.Momentum(0.1, 0.9)),
}
# Compressors that send everything must behave like an exact optimizer.
WHOLE = ("ef(topk(ratio=1))", "topk(ratio=1)", "ef(powersgd(start_step=9))")


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("mode", "steps"), [("eager", 2), ("function", 1), ("session", 2)]
)
@pytest.mark.parametrize("name", MAKERS)
def test_what_sends_all_is_as_without(name: str, mode: str, steps: int) -> None:
    """With sparse gradients, which stay sparse, and accumulated ones."""
    family, make = MAKERS[name]
    batches = problem.batches(4)
    parts = batches
    if steps == 2:
        halves = [[np.split(part, 2) for part in batch] for batch in batches]
        parts = [(i[k], t[k]) for i, t in halves for k in range(2)]
    compressor = WHOLE[len(name) % len(WHOLE)]
    actual = problem.train(
        helpers.make(2),
        *(family, make, parts, mode),
        accumulation_steps=steps,
        compressor=compressor,
    )
    problem.assert_close(actual, problem.train_plain(family, make, batches))


@pytest.mark.battery(5)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "compressor", ["bf16", "ef(int8)", "ef(powersgd(rank=1))", "ef(topk(ratio=0.5))"]
)
def test_what_loses_little_is_close(compressor: str, inside: bool) -> None:
    """Even if the optimizer, with its state, is made inside step_fn."""

    def make() -> Any:
        return kopt.SGD(0.02)

    batches = problem.batches(30)
    actual = problem.train(
        helpers.make(3), problem.KERAS, make, batches, "eager", inside,
        compressor=compressor,
    )  # fmt: skip
    expected = problem.train_plain(problem.KERAS, make, batches)
    problem.assert_close(actual, expected, 0.1)


def test_a_variables_synchronizer_comes_first() -> None:
    repl = helpers.make(2, variables="mirrored")
    with repl.context():
        variables = [tf.Variable(tf.zeros([32])) for _ in range(4)]
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0), compressor="bf16")
    named = ["", "ef(int8)", "none", compressors.TopK(0.5)]
    for variable, compressor in zip(variables, named, strict=True):
        helpers.synchronize(variable, AllReduceSynchronizer(compressor=compressor))
    value = tf.linspace(1.0, 1.003, 32)

    def step_fn() -> None:
        optimizer.apply([value] * 4, variables)

    repl.run(step_fn)
    cast, whole, exact, large = (-v.numpy() for v in variables)
    np.testing.assert_array_equal(cast, np.ones(32))
    assert 0 < np.abs(whole - value).max() < 0.02
    np.testing.assert_array_equal(exact, value)
    assert (large == 0).sum() == 16
    dtypes = {v.dtype for row in repl.plan for v in row.operands[0]}
    assert dtypes >= {"bfloat16", "int8", "float32"}


def test_a_synchronizer_that_names_what_there_is_not() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0, name="w")
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))
    helpers.synchronize(w, AllReduceSynchronizer(compressor="gzip"))
    with pytest.raises(replicator.ArgumentError, match=r"(?s)'gzip'.*use one of"):
        repl.run(lambda: optimizer.apply([tf.ones([])], [w]))
    helpers.synchronize(w, AllReduceSynchronizer(compressor=object()))
    with pytest.raises(
        replicator.ArgumentError, match=r"the synchronizer of w:0 was given compressor"
    ):
        repl.run(lambda: optimizer.apply([tf.ones([])], [w]))


@pytest.mark.parametrize("bad", ["gzip", 3, compressors.BF16, "ef", b"bf16"])
def test_what_is_no_compressor(bad: Any) -> None:
    with pytest.raises(
        replicator.ArgumentError, match=r"compressor.*\n.*at .*test_com"
    ):
        helpers.make(2).wrap_optimizer(kopt.SGD(0.1), compressor=bad)


class InColumns(strategy.Builder):
    """Divides variables by columns, when they are created or in the first step."""

    may_divide = True

    def __init__(self, late: bool) -> None:
        self.late = late

    def nodes(self, variables: Any, resources: Any) -> Any:
        how = strategy.AllReduceSynchronizer()
        for variable in variables:
            assert variable.sparse is False if self.late else True
            yield strategy.Node.in_parts(variable.path, 1, [2, 1], [how, how])


def test_what_is_owed_of_a_variable_that_is_divided_late(
    tmp_path: pathlib.Path,
) -> None:
    """It is that of a variable that was created in parts, in checkpoints, too."""
    kept, values = [], []
    for late in (False, True):
        repl = helpers.make(2, strategy=InColumns(late))
        with repl.context():
            v = tf.Variable(np.arange(12.0).reshape(4, 3), dtype=tf.float32, name="v")
            optimizer = repl.wrap_optimizer(
                kopt.SGD(0.1), compressor="ef(powersgd(rank=1))"
            )

        def step_fn(repl: Any = repl, v: Any = v, optimizer: Any = optimizer) -> None:
            gradient = v**2 * (1.0 + repl.replica_id)
            optimizer.apply_gradients([(gradient, v)])

        for _ in range(3):
            repl.run(step_fn)
        path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / str(late)))
        names = [name for name, _ in tf.train.list_variables(path)]
        kept.append([name for name in names if "compression" in name])
        values.append(v.numpy())
    np.testing.assert_array_equal(values[0], values[1])
    assert kept[0] and kept[0] == kept[1]


def test_a_variable_that_only_some_replicas_use() -> None:
    """It counts as zeros on the others, which owe nothing of it."""
    repl, optimizer, one, two = problem.wrapped(
        lambda: kopt.SGD(1.0),
        tf.zeros([4]),
        tf.zeros([4]),
        compressor="ef(topk(ratio=0.5))",
    )

    def step_fn() -> None:
        gradient = tf.constant([3.0, 0.5, 2.0, 0.0])
        own = None if repl.replica_id else gradient
        optimizer.apply([own, gradient], [one, two])

    repl.run(step_fn)
    repl.run(step_fn)
    np.testing.assert_array_equal(-one.numpy(), [3.0, 0.0, 2.0, 0.0])
    np.testing.assert_array_equal(-two.numpy(), [6.0, 0.0, 4.0, 0.0])


def test_keras_fit_compresses() -> None:
    """With uneven batches, the last of each epoch."""
    x = np.random.default_rng(0).standard_normal([90, 12]).astype("f")
    y = (x @ np.arange(12)[:, None] / 12).astype("f")
    repl = helpers.make(2)
    losses = {}
    for compressor in (None, "bf16", "ef(int8)", "ef(powersgd(rank=1))"):
        tf.keras.utils.set_random_seed(1)
        with repl.context():
            model = tf.keras.Sequential(
                [
                    tf.keras.layers.Input([12]),
                    tf.keras.layers.Dense(16, activation="relu"),
                    tf.keras.layers.Dense(1),
                ]
            )
            optimizer = repl.wrap_optimizer(kopt.Adam(0.01), compressor=compressor)
            model.compile(optimizer, "mse")
        repl.keras_model(model)
        history = model.fit(x, y, batch_size=20, epochs=4, verbose=0, shuffle=False)
        losses[compressor] = history.history["loss"]
        helpers.assert_replicas_equal(model.trainable_variables)
    exact = losses.pop(None)
    for compressor, loss in losses.items():
        assert loss != exact, compressor
        np.testing.assert_allclose(loss, exact, rtol=0.5, err_msg=compressor)


def test_what_only_the_owner_needs_goes_to_the_owner() -> None:
    """According to TensorFlow's transfers between two hosts with one replica each."""

    def sent(compressor: Any) -> dict[Any, int]:
        def make_step(repl: replicator.Replicator) -> Any:
            only = tf.Variable(tf.zeros([40, 50]))
            optimizer = repl.wrap_optimizer(
                tf.compat.v1.train.GradientDescentOptimizer(1.0), compressor=compressor
            )

            def step_fn() -> Any:
                gradient = helpers.opaque(np.ones([40, 50], "f"))
                update = optimizer.apply_gradients([(gradient, only)])
                with tf.control_dependencies([update]):
                    return tf.constant(1.0)

            return step_fn

        options = {"variables": "sharded", "factors": False}
        return dict(paper_hosts.run((0, 1), make_step, **options).sent)

    plain = sent(None)
    # The gradient, and a signal that it was applied.
    assert plain == {(1, 0): 1, (0, 1): 1}
    assert sent("bf16") == plain
    # A number that says whether all are finite comes and goes, too; the rest are
    # signals,
    # by which replicas write their residuals once nothing can fail.
    assert sent("ef(bf16)") == {(1, 0): 3, (0, 1): 4}


@pytest.mark.parametrize("compressor", [None, "fp16", "powersgd"])
def test_variables_of_unknown_rank_are_trained(compressor: str | None) -> None:
    repl = helpers.make(2)
    with repl.context():
        v = tf.Variable([[2.0], [4.0]], shape=tf.TensorShape(None))
        optimizer = repl.wrap_optimizer(kopt.SGD(0.5), compressor=compressor)

    def step_fn() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v) * (1.0 + repl.replica_id)
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])

    repl.run(step_fn)
    np.testing.assert_array_equal(v, [[1.25], [3.25]])
