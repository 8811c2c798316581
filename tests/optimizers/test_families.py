# SPDX-License-Identifier: Apache-2.0
"""Replicated training equals plain training on the whole batch, for all optimizers.

Those of Keras 3, of legacy Keras, of Sonnet and of tf.compat.v1.train; and what only
one of these families has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

import replicator
from tests import helpers, sampling
from tests.optimizers import problem

v1 = tf.compat.v1
kopt = tf.keras.optimizers
lopt = tf_keras.optimizers
old = lopt.legacy
mixed = tf_keras.mixed_precision
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


KERAS = {
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
    KERAS["multi"] = lambda: _multi(kopt.Adam(0.1), kopt.SGD(0.1))
LEGACY = {
    "SGD": lambda: lopt.SGD(0.1),
    "Nesterov": lambda: lopt.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: lopt.Adam(0.1),
    "Amsgrad": lambda: lopt.Adam(0.1, amsgrad=True),
    "AdamW": lambda: lopt.AdamW(0.1, weight_decay=0.1),
    "RMSprop": lambda: lopt.RMSprop(0.1, momentum=0.5, centered=True),
    "Adagrad": lambda: lopt.Adagrad(0.1),
    "Adadelta": lambda: lopt.Adadelta(1.0),
    "Adafactor": lambda: lopt.Adafactor(0.1),
    "Lion": lambda: lopt.Lion(0.1),
    "Adamax": lambda: lopt.Adamax(0.1),
    "Ftrl": lambda: lopt.Ftrl(0.1, l1_regularization_strength=0.01),
    "clipnorm": lambda: lopt.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "clipvalue": lambda: lopt.SGD(0.1, momentum=0.9, clipvalue=0.1),
    "global_clipnorm": lambda: lopt.Adam(0.1, global_clipnorm=0.5),
    "ema": lambda: lopt.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "schedule": lambda: lopt.Adam(lopt.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "loss_scale": lambda: mixed.LossScaleOptimizer(lopt.Adam(0.1), initial_scale=4.0),
    "legacy_SGD": lambda: old.SGD(0.1, momentum=0.9, nesterov=True, decay=0.1),
    "legacy_Adam": lambda: old.Adam(0.1, amsgrad=True),
    "legacy_RMSprop": lambda: old.RMSprop(0.1, momentum=0.5, centered=True),
    "legacy_Adagrad": lambda: old.Adagrad(0.1),
    "legacy_Adadelta": lambda: old.Adadelta(1.0),
    "legacy_Nadam": lambda: old.Nadam(0.1),
    "legacy_Adamax": lambda: old.Adamax(0.1),
    "legacy_Ftrl": lambda: old.Ftrl(0.1, l1_regularization_strength=0.01),
    "legacy_clipnorm": lambda: old.SGD(0.1, global_clipnorm=0.5),
    "legacy_schedule": lambda: old.Adam(lopt.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "legacy_loss_scale": lambda: mixed.LossScaleOptimizer(
        old.Adam(0.1), initial_scale=4.0
    ),
}
SONNET = {
    "SGD": lambda: snt.optimizers.SGD(0.1),
    "Momentum": lambda: snt.optimizers.Momentum(0.1, 0.9, use_nesterov=True),
    "Adam": lambda: snt.optimizers.Adam(0.1),
    "RMSProp": lambda: snt.optimizers.RMSProp(0.1, momentum=0.5, centered=True),
}
V1 = {
    "GradientDescent": lambda: v1.train.GradientDescentOptimizer(0.1),
    "Momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "Adam": lambda: v1.train.AdamOptimizer(0.1),
    "Adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "RMSProp": lambda: v1.train.RMSPropOptimizer(0.1, momentum=0.5, centered=True),
    "Ftrl": lambda: v1.train.FtrlOptimizer(0.1, l1_regularization_strength=0.01),
}
CATALOGUE: dict[str, tuple[problem.Family, Callable[[], Any]]] = {
    f"{prefix} {name}": (family, make)
    for prefix, family, makers in (
        ("keras", problem.KERAS, KERAS),
        ("keras pairs", problem.KERAS_PAIRS, KERAS),
        ("legacy", problem.LEGACY_KERAS, LEGACY),
        ("sonnet", problem.SONNET, SONNET),
        ("v1", problem.V1, V1),
    )
    for name, make in makers.items()
    if prefix != "keras pairs" or name in ("Momentum", "Adam", "loss_scale")
}
# Those that are trained in all ways, by any number of replicas; and in the step.
IN_ALL_WAYS = (
    *("keras Momentum", "keras Adam", "keras pairs Adam", "keras pairs loss_scale"),
    *("keras global_clipnorm", "legacy Adam", "legacy loss_scale", "sonnet Momentum"),
    *("legacy legacy_Adam", "legacy legacy_loss_scale", "v1 Momentum", "v1 Adam"),
)
INSIDE = ("sonnet Momentum", "v1 Momentum", "v1 Adam")
CASES = dict.fromkeys(
    [
        *((name, "eager", 2, False) for name in CATALOGUE),
        *((f"sonnet {name}", "session", 2, False) for name in SONNET),
        *((f"v1 {name}", mode, 2, False) for name in V1 for mode in helpers.MODES[1:]),
        *(
            (*c, False)
            for c in sampling.in_turn(IN_ALL_WAYS, helpers.MODES, [1, 3, 4, 2])
        ),
        *((*case, True) for case in sampling.in_turn(INSIDE, helpers.MODES, [3, 2])),
    ]
)


@functools.cache
def _plain(name: str) -> list[np.ndarray]:
    return problem.train_plain(*CATALOGUE[name], problem.batches(4))


@pytest.mark.battery(5)
@pytest.mark.parametrize(("name", "mode", "replicas", "inside"), CASES)
def test_equals_plain_on_the_whole_batch(
    name: str, mode: str, replicas: int, inside: bool
) -> None:
    """Also of an optimizer that is made inside the step."""
    actual = problem.train(
        helpers.make(replicas), *CATALOGUE[name], problem.batches(4), mode, inside
    )
    problem.assert_close(actual, _plain(name))
    # Otherwise nothing was tested.
    assert np.max(np.abs(actual[1] - problem.MATRIX)) > 1e-4


# --- Keras ----------------------------------------------------------------------------


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


# --- Legacy Keras ---------------------------------------------------------------------


@pytest.mark.parametrize("build", ["trace", "clone"])
@pytest.mark.parametrize("variables", ["sharded", "mirrored"])
def test_nadam_updates_all_replicas_alike(variables: str, build: str) -> None:
    """It counts its calls in Python, and thus the traces of a tf.function, too.

    Of mirrored variables, the build starts over: what it writes is made equal.
    """
    data, made = problem.batches(4), {"variables": variables, "build": build}
    one, three = (
        problem.train(helpers.make(r, **made), problem.LEGACY_KERAS, lopt.Nadam, data)
        for r in (1, 3)
    )
    problem.assert_close(three, one)


# --- Sonnet ---------------------------------------------------------------------------


def test_learning_rate_may_be_a_variable_that_the_step_changes() -> None:
    repl = helpers.make(2)
    with repl.context():
        rate = tf.Variable(1.0, trainable=False)
        w = tf.Variable(10.0)
        optimizer = repl.wrap_optimizer(snt.optimizers.SGD(rate))

    def step_fn() -> None:
        optimizer.apply([tf.constant(1.0 + repl.replica_id)], [w])
        rate.assign(rate * 0.5)

    for _ in range(3):
        repl.run(step_fn)
    np.testing.assert_allclose(w.numpy(), 10 - 1.5 * (1 + 0.5 + 0.25), rtol=1e-6)
    helpers.assert_replicas_equal([w, rate])


def test_any_module_with_apply_is_taken() -> None:
    class Clipped(tf.Module):
        """Clips its gradients, which must be the combined ones."""

        def apply(
            self, updates: list[tf.Tensor], parameters: list[tf.Variable]
        ) -> None:
            for update, parameter in zip(updates, parameters, strict=True):
                parameter.assign_sub(tf.clip_by_value(update, -1.0, 1.0))

    repl, optimizer, w = problem.wrapped(Clipped, 0.0)
    # Clipped separately, replica 0 would pass 1 instead of 3: mean 0, not 1.
    repl.run(lambda: optimizer.apply([tf.constant([3.0, -1.0][repl.replica_id])], [w]))
    assert w.numpy() == -1.0


def test_takes_no_more_arguments_than_the_optimizer() -> None:
    repl, optimizer, w = problem.wrapped(lambda: snt.optimizers.SGD(1.0), 1.0)
    gradient = tf.constant(1.0)
    with pytest.raises(TypeError, match="takes 3 positional arguments but 4"):
        repl.run(lambda: optimizer.apply([gradient], [w], 0.5))
    repl.run(lambda: optimizer.apply([gradient], [w], weight=0.5))
    assert w.numpy() == 0.0


# --- TensorFlow 1 ---------------------------------------------------------------------


def _minimize(how: str, mode: str) -> tuple[list[np.ndarray], int]:
    """Takes two steps; returns the components of w and of the global step."""
    repl = helpers.make(2)
    symbolic = mode == "session"

    def make_step() -> Any:
        with repl.context():
            w = tf.Variable(np.float64([1.0, 2.0]), name="w")
            step = tf.Variable(0, dtype=tf.int64, trainable=False, name="global_step")
            optimizer = repl.wrap_optimizer(v1.train.MomentumOptimizer(0.25, 0.5))
        variables.extend([w, step])

        def step_fn() -> tf.Tensor:
            def loss() -> tf.Tensor:
                return tf.reduce_sum(w * w) * (repl.replica_id + 1.0)

            if how == "minimize":
                update = optimizer.minimize(
                    loss() if symbolic else loss, global_step=step, var_list=[w]
                )
            else:
                pairs = optimizer.compute_gradients(
                    loss() if symbolic else loss, var_list=[w]
                )
                assert pairs[0][1] is w
                update = optimizer.apply_gradients(pairs, global_step=step)
            with tf.control_dependencies([update] if symbolic else []):
                return w.read_value(), step.read_value()

        return step_fn

    variables: list[tf.Variable] = []
    values, steps = helpers.run(mode, repl, make_step, steps=2)
    assert values[0].tobytes() == values[1].tobytes()
    assert steps[0] == steps[1]
    return list(values), int(steps[0])


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("how", ["minimize", "compute_gradients"])
def test_minimize_counts_the_global_step_once(how: str, mode: str) -> None:
    values, steps = _minimize(how, mode)
    w, velocity = np.float64([1.0, 2.0]), 0.0
    for _ in range(2):
        velocity = 0.5 * velocity + 2 * w * 1.5  # the mean of 1 and 2
        w = w - 0.25 * velocity
    np.testing.assert_allclose(values[0], w, rtol=1e-12)
    assert steps == 2


def test_minimize_finds_the_trainable_variables_of_a_graph() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():

        def step_fn() -> tf.Tensor:
            w = v1.get_variable("w", initializer=3.0)
            step = v1.train.get_or_create_global_step()
            optimizer = repl.wrap_optimizer(v1.train.AdamOptimizer(0.5))
            update = optimizer.minimize(w * (1.0 + repl.replica_id), global_step=step)
            with tf.control_dependencies([update]):
                return tf.stack(
                    [w.read_value(), tf.cast(step.read_value(), tf.float32)]
                )

        fetches = repl.run(step_fn)
        names = sorted(variable.name for variable in v1.global_variables())
        with helpers.monitored_session() as session:
            first = session.run(fetches)
            second = session.run(fetches)
    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=3.0)
        step = v1.train.get_or_create_global_step()
        v1.train.AdamOptimizer(0.5).minimize(w * 1.5, global_step=step)
        assert names == sorted(variable.name for variable in v1.global_variables())
    np.testing.assert_allclose(first, [[2.5, 1], [2.5, 1]], rtol=1e-6)
    np.testing.assert_allclose(second, [[2.0, 2], [2.0, 2]], rtol=1e-6)
