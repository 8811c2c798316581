# SPDX-License-Identifier: Apache-2.0
"""Partitioned variables are updated like whole ones, by optimizers of all families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

import replicator
from replicator.optimizers import parts
from replicator.variables.placement import Owned
from replicator.variables.replicated import plain
from tests.variables import parted

K, T, L = keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy
V, S = tf.compat.v1.train, snt.optimizers

random = np.random.RandomState(0)
TABLE = random.randn(9, 4).astype(np.float32)
KERNEL = random.randn(4, 5).astype(np.float32)
BIAS = random.randn(5).astype(np.float32)
IDS = np.array([[1, 8], [6, 3], [0, 2], [4, 5], [7, 3], [1, 1]])

BY_PART: dict[str, Callable[[], Any]] = {
    "SGD": lambda: K.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: K.Adam(0.05, amsgrad=True),
    "AdamW": lambda: K.AdamW(0.05, weight_decay=0.1),
    "Nadam": lambda: K.Nadam(0.05),
    "Adamax": lambda: K.Adamax(0.05),
    "RMSprop": lambda: K.RMSprop(0.05, centered=True, momentum=0.5),
    "Adagrad": lambda: K.Adagrad(0.05),
    "Adadelta": lambda: K.Adadelta(0.5),
    "Ftrl": lambda: K.Ftrl(0.05),
    "Lion": lambda: K.Lion(0.05),
    "global_clipnorm": lambda: K.SGD(0.05, global_clipnorm=0.1),
    "clipvalue": lambda: K.SGD(0.5, clipvalue=0.01),
    "clipnorm": lambda: K.Adam(0.05, clipnorm=0.1),
    "tf_keras clipnorm": lambda: T.Adam(0.05, clipnorm=0.1),
    "legacy clipnorm": lambda: L.SGD(0.05, clipnorm=0.1),
    "averages": lambda: K.SGD(0.05, use_ema=True, ema_overwrite_frequency=2),
    "tf_keras SGD": lambda: T.SGD(0.05, momentum=0.9),
    "tf_keras AdamW": lambda: T.AdamW(0.05, weight_decay=0.1, use_ema=True),
    "legacy SGD": lambda: L.SGD(0.05, momentum=0.9),
    "legacy Adam": lambda: L.Adam(0.05),
    "legacy Adagrad": lambda: L.Adagrad(0.05),
    "v1 GradientDescent": lambda: V.GradientDescentOptimizer(0.05),
    "v1 Momentum": lambda: V.MomentumOptimizer(0.05, 0.9),
    "v1 Adam": lambda: V.AdamOptimizer(0.05),
    "v1 Adagrad": lambda: V.AdagradOptimizer(0.05),
    "v1 RMSProp": lambda: V.RMSPropOptimizer(0.05),
    "v1 Ftrl": lambda: V.FtrlOptimizer(0.05),
    "v1 Adadelta": lambda: V.AdadeltaOptimizer(0.5),
    "Sonnet SGD": lambda: S.SGD(0.05),
    "Sonnet Momentum": lambda: S.Momentum(0.05, 0.9),
    "Sonnet Adam": lambda: S.Adam(0.05),
    "Sonnet RMSProp": lambda: S.RMSProp(0.05, centered=True),
}


class Own(K.SGD):
    """A user's optimizer, whose update needs the whole variable."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Normalizes all gradients to one length."""
        gradient = tf.convert_to_tensor(gradient)
        super().update_step(gradient / tf.norm(gradient), variable, learning_rate)


AS_WHOLE: dict[str, Callable[[], Any]] = {
    "Lamb": lambda: K.Lamb(0.05),
    "Adafactor": lambda: K.Adafactor(0.05),
    "Muon": lambda: K.Muon(0.05),
    "ScheduleFree": lambda: K.ScheduleFreeAdamW(0.05),
    "LossScale": lambda: K.LossScaleOptimizer(K.Adam(0.05)),
    "accumulation by Keras": lambda: K.Adam(0.05, gradient_accumulation_steps=2),
    "of the user's own": lambda: Own(0.05),
    "tf_keras Adafactor": lambda: T.Adafactor(0.05),
    "tf_keras LossScale": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        T.Adam(0.05)
    ),
}


def made(repl: Any) -> list[Any]:
    """Creates Keras variables, which all families can update."""
    with repl.context():
        return [
            keras.Variable(
                lambda *_, v=value, **__: tf.constant(v), value.shape, name=n
            )
            for n, value in (("table", TABLE), ("kernel", KERNEL), ("bias", BIAS))
        ]


def trained(repl: Any, make: Callable[[], Any], steps: int = 3, **options: Any) -> Any:
    """Trains; returns the optimizer, the variables and their values by name."""
    variables = made(repl)
    with repl.context():
        optimizer = repl.wrap_optimizer(make(), **options)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        given = variables
    else:
        given = [plain(v) for v in variables]
    table, kernel, bias = given

    def input_fn(ctx: Any) -> tf.Tensor:
        return tf.constant(np.split(IDS, ctx.num_replicas)[ctx.replica_id])

    def step_fn(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            rows = tf.reduce_sum(tf.gather(plain(table), ids), 1)
            out = tf.tanh(rows @ plain(kernel) + plain(bias))
            loss = tf.reduce_mean(tf.reduce_sum(out**2, 1))
            scaled = getattr(optimizer, "get_scaled_loss", lambda x: x)(loss)
            if hasattr(optimizer, "scale_loss"):
                scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, [plain(v) for v in variables])
        grads = getattr(optimizer, "get_unscaled_gradients", lambda g: g)(grads)
        if hasattr(optimizer, "apply_gradients"):
            optimizer.apply_gradients(zip(grads, given, strict=True))
        else:
            optimizer.apply(grads, given)

    for _ in range(steps):
        repl.run(step_fn, input_fn)
    return optimizer, variables


def state_of(optimizer: Any, variables: Any) -> list[np.ndarray]:
    """Returns the values of the variables and slots."""
    slots: Any = []
    if not isinstance(optimizer, snt.optimizers.SGD):
        slots = optimizer.variables
    slots = slots() if callable(slots) else slots
    if isinstance(optimizer, V.Optimizer):  # which lists them by names with counters
        names = optimizer.get_slot_names()
        slots = [optimizer.get_slot(plain(v), n) for n in names for v in variables]
    return [v.numpy() for v in (*variables, *slots)]


def check(name: str, make: Callable[[], Any], count: int, axis: int) -> Any:
    """Compares with one device; returns the optimizer and the variables."""
    expected = state_of(*trained(parted.one_device(), make))
    repl = parted.replicas(count, parted.InParts(count, axis))
    optimizer, variables = trained(repl, make)
    actual = state_of(optimizer, variables)
    assert len(actual) == len(expected)
    for own, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5, err_msg=name)
    return optimizer, variables


def _often(names: Any, quick: tuple[str, ...]) -> list[Any]:
    """Returns the names, all but a few of which run in long runs only."""
    slow = pytest.mark.slow
    return [n if n in quick else pytest.param(n, marks=slow) for n in names]


QUICK = ("Adam", "clipnorm", "legacy clipnorm", "v1 Adam", "Sonnet Adam", "Lamb")


@pytest.mark.battery(5)
@pytest.mark.parametrize("name", _often(BY_PART, QUICK))
def test_updates_part_by_part_as_whole_variables(name: str) -> None:
    count, axis = (2, 0) if list(BY_PART).index(name) % 2 else (3, 1)
    optimizer, variables = check(name, BY_PART[name], count, axis)
    assert parts.is_elementwise(optimizer)
    whole = [plain(v) for v in variables]
    if name != "Sonnet SGD":
        slots = optimizer.variables
        slots = [plain(s) for s in (slots() if callable(slots) else slots)]
        for slot in slots:
            if slot.shape == whole[0].shape:
                assert slot.layout == whole[0].layout
                for own, part in zip(slot.parts, whole[0].parts, strict=True):
                    assert own.placement == part.placement


@pytest.mark.parametrize("name", _often(AS_WHOLE, QUICK))
def test_optimizers_whose_updates_are_not_elementwise_update_wholes(name: str) -> None:
    count, axis = (2, 0) if list(AS_WHOLE).index(name) % 2 else (2, 1)
    optimizer, _ = check(name, AS_WHOLE[name], count, axis)
    assert not parts.is_elementwise(optimizer)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_of_several_steps_are_added_up_whole(count: int) -> None:
    def make() -> Any:
        return K.Adam(0.05)

    options: dict[str, Any] = {"steps": 4, "accumulation_steps": 2}
    expected = state_of(*trained(parted.one_device(), make, **options))
    actual = state_of(*trained(parted.replicas(count), make, **options))
    for own, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def test_weights_say_what_gradients_count() -> None:
    def value(repl: Any) -> np.ndarray:
        table, *_ = made(repl)
        with repl.context():
            optimizer = repl.wrap_optimizer(K.SGD(1.0))

        def step_fn() -> None:
            gradient = tf.ones_like(TABLE) * (1.0 + repl.replica_id)
            optimizer.apply([gradient], [table], weight=1.0 + 2.0 * repl.replica_id)

        repl.run(step_fn)
        return table.numpy()

    np.testing.assert_allclose(value(parted.replicas(2)), TABLE - 1.75, rtol=1e-5)


def test_constraints_hold_of_the_whole() -> None:
    class Constrained(keras.constraints.Constraint):
        def __call__(self, w: Any) -> Any:
            return w / tf.norm(w)

    def value(repl: Any) -> np.ndarray:
        with repl.context():
            dense = keras.layers.Dense(5, kernel_constraint=Constrained())
            dense.build([None, 4])
            optimizer = repl.wrap_optimizer(K.Adam(0.1))
        dense.kernel.assign(KERNEL)

        def step_fn() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(dense(tf.constant(TABLE)) ** 2)
            weights = dense.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)

        repl.run(step_fn)
        return dense.kernel.numpy()

    expected = value(parted.one_device())
    np.testing.assert_allclose(value(parted.replicas(2)), expected, rtol=1e-5)
    assert np.linalg.norm(expected) == pytest.approx(1.0)


def test_what_is_excluded_from_weight_decay_stays_so() -> None:
    def value(repl: Any) -> list[np.ndarray]:
        variables = made(repl)
        with repl.context():
            adam = K.AdamW(0.1, weight_decay=0.5)
            adam.exclude_from_weight_decay(var_names=["^table$"])
            optimizer = repl.wrap_optimizer(adam)
        grads = [tf.ones(v.shape) for v in variables]
        repl.run(lambda: optimizer.apply(grads, variables))
        return [v.numpy() for v in variables]

    for own, other in zip(
        value(parted.replicas(2)), value(parted.one_device()), strict=True
    ):
        np.testing.assert_allclose(own, other, rtol=1e-5)


def test_a_variable_that_no_replica_uses_is_left_alone() -> None:
    repl = parted.replicas(2)
    variables = made(repl)
    with repl.context():
        optimizer = repl.wrap_optimizer(K.SGD(1.0))
    grads = [tf.ones_like(TABLE), None, tf.ones_like(BIAS)]
    repl.run(lambda: optimizer.apply(grads, variables))
    np.testing.assert_array_equal(variables[1].numpy(), KERNEL)
    np.testing.assert_allclose(variables[0].numpy(), TABLE - 1, rtol=1e-6)


def test_updates_outside_of_steps_reach_all_parts() -> None:
    repl = parted.replicas(2)
    table, *_ = made(repl)
    with repl.context():
        optimizer = repl.wrap_optimizer(K.Adam(0.1))
    whole, alone = tf.Variable(TABLE), K.Adam(0.1)
    for v, own in ((table, optimizer), (whole, alone)):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.convert_to_tensor(v) ** 3)
            own.apply([tape.gradient(loss, plain(v))], [v])
    np.testing.assert_allclose(table.numpy(), whole.numpy(), rtol=1e-5)


class Raw(V.GradientDescentOptimizer):
    """A user's optimizer that writes by the handle."""

    def _resource_apply_dense(self, grad: Any, handle: Any) -> Any:
        return tf.raw_ops.ResourceApplyGradientDescent(
            var=handle.handle, alpha=0.5, delta=grad / tf.norm(grad)
        )


def test_an_optimizer_that_reaches_for_the_whole_is_refused_by_name() -> None:
    repl = parted.replicas(2)
    table = plain(made(repl)[0])
    with repl.context():
        optimizer = repl.wrap_optimizer(Raw(0.1))
    with pytest.raises(
        replicator.UnsupportedError,
        match=r"(?s)Raw.*table.*3 parts.*test_parts.py.*Fix: .*whole",
    ):
        repl.run(lambda: optimizer.apply_gradients([(tf.ones_like(TABLE), table)]))
    np.testing.assert_array_equal(table.numpy(), TABLE)


@pytest.mark.parametrize("make", [lambda: K.Adam(0.05), lambda: K.Lamb(0.05)])
def test_copies_of_parts_are_those_of_the_updated_whole(make: Any) -> None:
    placements = [Owned(0, proxies=True), Owned(1, proxies=True)]
    repl = parted.replicas(2, parted.As(parted.chosen(0, [4, 5], placements)))
    with repl.context():
        table = tf.Variable(TABLE)
        optimizer = repl.wrap_optimizer(make())

    def step_fn() -> tf.Tensor:
        before = table.read_value()
        optimizer.apply([tf.ones_like(TABLE)], [table])
        return before

    repl.run(step_fn)
    after = table.numpy()
    assert not np.allclose(after, TABLE)
    for read in repl.run(step_fn):
        np.testing.assert_array_equal(read, after)
