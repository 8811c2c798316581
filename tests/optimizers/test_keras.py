# SPDX-License-Identifier: Apache-2.0
"""Keras 3 optimizers: replicated training equals plain training on the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers
from tests.optimizers import problem

kopt = tf.keras.optimizers
needs_multi = pytest.mark.skipif(
    not hasattr(kopt, "MultiOptimizer"), reason="Keras is older than MultiOptimizer"
)


def _multi(adam: Any, sgd: Any) -> Any:
    """Returns an optimizer that gives matrices to one optimizer, the rest to another.

    Args:
        adam: The optimizer of matrices.
        sgd: The optimizer of everything else.
    """
    return kopt.MultiOptimizer(lambda v: adam if len(v.shape) > 1 else sgd)


CATALOGUE = {
    "SGD": lambda: kopt.SGD(0.1),
    "Momentum": lambda: kopt.SGD(0.1, momentum=0.9),
    "Nesterov": lambda: kopt.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: kopt.Adam(0.1),
    "Amsgrad": lambda: kopt.Adam(0.1, amsgrad=True),
    "AdamW": lambda: kopt.AdamW(0.1, weight_decay=0.1),
    "RMSprop": lambda: kopt.RMSprop(0.1, momentum=0.5, centered=True),
    "Adagrad": lambda: kopt.Adagrad(0.1),
    "Adadelta": lambda: kopt.Adadelta(1.0),
    "Adafactor": lambda: kopt.Adafactor(0.1),
    "Lion": lambda: kopt.Lion(0.1),
    "Nadam": lambda: kopt.Nadam(0.1),
    "Adamax": lambda: kopt.Adamax(0.1),
    "Ftrl": lambda: kopt.Ftrl(0.1, l1_regularization_strength=0.01),
    "clipnorm": lambda: kopt.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "clipvalue": lambda: kopt.SGD(0.1, momentum=0.9, clipvalue=0.1),
    "global_clipnorm": lambda: kopt.Adam(0.1, global_clipnorm=0.5),
    "weight_decay": lambda: kopt.SGD(0.1, weight_decay=0.1),
    "ema": lambda: kopt.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "keras_accumulation": lambda: kopt.Adam(0.1, gradient_accumulation_steps=2),
    "schedule": lambda: kopt.Adam(kopt.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "loss_scale": lambda: kopt.LossScaleOptimizer(kopt.Adam(0.1), initial_scale=4.0),
}
if hasattr(kopt, "MultiOptimizer"):
    CATALOGUE["multi"] = lambda: _multi(kopt.Adam(0.1), kopt.SGD(0.1))


@functools.cache
def _plain(name: str) -> list[np.ndarray]:
    return problem.train_plain(problem.KERAS, CATALOGUE[name], problem.batches(4))


def _train(name: str, replicas: int, **options: Any) -> list[np.ndarray]:
    return problem.train(
        helpers.make(replicas),
        options.pop("family", problem.KERAS),
        CATALOGUE[name],
        problem.batches(4),
        **options,
    )


@pytest.mark.battery(5)
@pytest.mark.parametrize("name", CATALOGUE)
def test_equals_plain_on_the_whole_batch(name: str) -> None:
    actual = _train(name, 2)
    problem.assert_close(actual, _plain(name))
    # Otherwise nothing was tested.
    assert np.max(np.abs(actual[1] - problem.MATRIX)) > 1e-4


@pytest.mark.battery(5)
@pytest.mark.parametrize("replicas", [1, 3, 4])
@pytest.mark.parametrize("name", ["Momentum", "Adam"])
def test_equals_plain_on_any_number_of_replicas(name: str, replicas: int) -> None:
    problem.assert_close(_train(name, replicas), _plain(name))


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.parametrize("name", ["Momentum", "Adam", "global_clipnorm", "loss_scale"])
def test_equals_plain_in_all_modes(name: str, mode: str) -> None:
    actual = _train(name, 2, family=problem.KERAS_PAIRS, mode=mode)
    problem.assert_close(actual, _plain(name))


@needs_multi
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "used",
    [["abc", "ac"], ["", "ac"], ["a", "c"], ["c", "a"]],
    ids=lambda used: "-".join(name or "none" for name in used),
)
def test_multi_optimizers_leave_alone_what_no_replica_uses(
    used: list[str], scaled: bool
) -> None:
    """They refuse a part of the variables, and optimizers without any gradient."""

    def make() -> Any:
        made = _multi(kopt.Adam(0.1), kopt.SGD(0.1))
        return kopt.LossScaleOptimizer(made, initial_scale=8.0) if scaled else made

    def variables() -> dict[str, Any]:
        shapes = {"a": [2, 2], "b": [3, 1], "c": [2]}
        return {n: new(shape, n) for n, shape in shapes.items()}

    def new(shape: list[int], name: str) -> Any:
        return tf.keras.Variable(np.full(shape, 1.5, "float32"), name=name)

    def grads(of: dict[str, Any], names: str, optimizer: Any, share: float) -> Any:
        with tf.GradientTape() as tape:
            losses = [tf.reduce_sum(of[n].value ** 2) for n in names]
            loss = optimizer.scale_loss(share * tf.add_n([tf.constant(0.0), *losses]))
        return tape.gradient(loss, [v.value for v in of.values()])

    repl = helpers.make(2)
    with repl.context():
        mine, optimizer = variables(), repl.wrap_optimizer(make())

    def step_fn() -> None:
        given = grads(mine, used[repl.replica_id], optimizer, 1.0)
        optimizer.apply(given, list(mine.values()))

    plain, reference = variables(), make()
    for _ in range(3):
        repl.run(step_fn)
        names = "".join(used)
        reference.apply(grads(plain, names, reference, 0.5), list(plain.values()))
    for name, variable in mine.items():
        np.testing.assert_allclose(variable, plain[name], rtol=1e-6)


@needs_multi
@pytest.mark.parametrize("option", ["gradient_accumulation_steps", "use_ema"])
def test_what_has_no_effect_in_a_graph_is_refused_in_multi_optimizers(
    option: str,
) -> None:
    options: dict[str, Any] = {option: 2}
    if option == "use_ema":
        options["ema_overwrite_frequency"] = 2
    repl = helpers.make(2)
    with tf.Graph().as_default():
        with repl.context():
            v = tf.Variable([[1.0]])
            made = _multi(kopt.SGD(0.1, **options), kopt.SGD(0.1))
            optimizer = repl.wrap_optimizer(made)
        with pytest.raises(replicator.ArgumentError, match="no effect in a tf.Graph"):
            repl.run(lambda: optimizer.apply([tf.ones([1, 1])], [v]))
