# SPDX-License-Identifier: Apache-2.0
"""wrap_optimizer: several optimizers, slots, learning rates, every kind of step_fn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.programs import training

v1 = tf.compat.v1
kopt = tf.keras.optimizers

# --- Several optimizers, slots, learning rates ---------------------------------------


def test_two_optimizers_over_the_same_variables() -> None:
    """As in a GAN: in alternating steps, and both in one step."""
    repl = helpers.make(2)

    def losses(a: Any, b: Any, x: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.reduce_mean((a * b - x) ** 2), -tf.reduce_mean(a + b * x)

    def make() -> tuple[list[tf.Variable], list[Any]]:
        variables = [tf.Variable(np.float64(1.0)), tf.Variable(np.float64(2.0))]
        return variables, [kopt.Adam(0.5), kopt.SGD(0.25, momentum=0.5)]

    def update(variables: Any, optimizers: Any, x: Any) -> None:
        for which, optimizer in enumerate(optimizers):
            with tf.GradientTape() as tape:
                loss = losses(*variables, x)[which]
            optimizer.apply(tape.gradient(loss, variables), variables)

    with repl.context():
        own, optimizers = make()
        optimizers = [repl.wrap_optimizer(optimizer) for optimizer in optimizers]
    plain, plain_optimizers = make()
    xs = np.arange(8.0)

    def both() -> None:
        r = repl.replica_id
        update(own, optimizers, tf.constant(xs[4 * r : 4 * r + 4]))

    def second() -> None:
        x = tf.constant(xs[repl.replica_id :: 2])
        with tf.GradientTape() as tape:
            loss = losses(*own, x)[1]
        optimizers[1].apply(tape.gradient(loss, own), own)

    @tf.function
    def plain_second() -> None:
        with tf.GradientTape() as tape:
            loss = losses(*plain, tf.constant(xs))[1]
        plain_optimizers[1].apply(tape.gradient(loss, plain), plain)

    plain_both = tf.function(lambda: update(plain, plain_optimizers, tf.constant(xs)))
    for _ in range(3):
        repl.run(both)
        repl.run(second)
        plain_both()
        plain_second()
    for one, two in zip(own, plain, strict=True):
        np.testing.assert_allclose(one.numpy(), two.numpy(), rtol=1e-10)
    helpers.assert_replicas_equal(own)


def test_slots_of_a_v1_optimizer_are_one_per_variable_across_builds() -> None:
    """Variables that later builds of one step_fn use get their own slots."""
    repl = helpers.make(2)
    with repl.context():
        ws = [tf.Variable(0.0), tf.Variable(0.0), tf.Variable(0.0)]
        optimizer = repl.wrap_optimizer(v1.train.MomentumOptimizer(1.0, 0.5))
    used = [0]

    def step_fn() -> None:
        one = tf.constant(1.0)
        optimizer.apply_gradients([(one, ws[k]) for k in used])

    for used[:] in ([0], [0, 1], [2]):
        tf.function(lambda: repl.run(step_fn))()
    slots = [optimizer.get_slot(w, "momentum") for w in ws]
    assert len({id(slot) for slot in slots}) == 3
    assert [w.numpy() for w in ws] == [-2.5, -1.0, -1.0]


def test_learning_rate_between_steps() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(0.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))
    step = repl.build(lambda: optimizer.apply([tf.constant(1.0)], [w]))
    step()
    optimizer.learning_rate = 10.0
    step()
    optimizer.learning_rate.assign(100.0)
    step()
    assert w.numpy() == -111.0
    helpers.assert_replicas_equal([w, *optimizer.variables])


def test_learning_rate_in_the_step() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(0.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))

    def step_fn() -> None:
        optimizer.apply([tf.constant(1.0)], [w])
        optimizer.learning_rate = optimizer.learning_rate * 10.0

    for _ in range(3):
        repl.run(step_fn)
    assert w.numpy() == -111.0
    helpers.assert_replicas_equal([w, *optimizer.variables])


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("clip", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_clipping_sees_the_combined_gradient(clip: str, op: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(0.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0, **{clip: 1.5}), op=op)
    # Clipped separately: 1.5 and -1.0.
    gradient = [4.0, -1.0]
    repl.run(lambda: optimizer.apply([tf.constant(gradient[repl.replica_id])], [w]))
    assert w.numpy() == -1.5  # of 1.5, and of 3


def test_a_bound_method_is_built_once() -> None:
    repl = helpers.make(2)
    with repl.context():
        trainer = training.Trainer(repl)

    def input_fn() -> tf.Tensor:
        return tf.constant(1.0)

    builds = [repl.build(trainer.method, input_fn) for _ in range(2)]
    assert builds[0] is builds[1]
