# SPDX-License-Identifier: Apache-2.0
"""Methods that users override get combined gradients: the results of one device."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tests import helpers
from tests.optimizers import problem

kopt = tf.keras.optimizers


def _clipped(pairs: Any) -> Any:
    return [(None if g is None else tf.clip_by_norm(g, 0.1), v) for g, v in pairs]


class Clipping(kopt.SGD):
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        super().apply_gradients(_clipped(grads_and_vars))
        return "mine"


class ClippingScaled(kopt.LossScaleOptimizer):
    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients(_clipped(grads_and_vars))


class Both(kopt.SGD):
    def apply_gradients(self, grads_and_vars: Any, boost: float = 1.0) -> Any:
        grads, variables = zip(*_clipped(grads_and_vars), strict=True)
        return self.apply(grads, variables, boost=boost)

    def apply(self, grads: Any, variables: Any = None, boost: float = 1.0) -> Any:
        return super().apply([boost * g for g in grads], variables)


class Weighted(kopt.SGD):
    def apply(self, grads: Any, variables: Any = None, weight: float = 1.0) -> Any:
        return super().apply([weight * g for g in grads], variables)


def _scaled() -> Any:
    return ClippingScaled(kopt.SGD(1.0), initial_scale=2.0)


PROGRAMS = {
    "clipping": (lambda: Clipping(1.0), lambda o, g, v: o.apply_gradients([(g, v)])),
    "scaled": (_scaled, lambda o, g, v: o.apply_gradients([(g, v)])),
    "boost": (lambda: Both(1.0), lambda o, g, v: o.apply([g], [v], boost=0.5)),
    "positional": (lambda: Both(1.0), lambda o, g, v: o.apply([g], [v], 0.5)),
    "both": (lambda: Both(1.0), lambda o, g, v: o.apply_gradients([(g, v)], boost=0.5)),
    "weight": (lambda: Weighted(1.0), lambda o, g, v: o.apply([g], [v], weight=0.5)),
}


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_overrides_equal_one_device(name: str, op: str) -> None:
    make, apply = PROGRAMS[name]
    repl, wrapped, v = problem.wrapped(make, 1.0, op=op)

    def step_fn() -> None:
        apply(wrapped, 2.0 + 2.0 * repl.replica_id, v)

    plain_variable, plain = tf.Variable(1.0), make()
    for _ in range(3):
        repl.run(step_fn)
        combined = tf.constant(3.0 if op == "mean" else 6.0)
        apply(plain, combined, plain_variable)
    assert float(v) == pytest.approx(float(plain_variable))
    helpers.assert_replicas_equal([v])


def test_what_the_override_returns_is_returned() -> None:
    repl = helpers.make(2)
    with repl.context():
        v, wrapped = tf.Variable(1.0), repl.wrap_optimizer(Clipping(1.0))
    returned: list[Any] = []

    def step_fn() -> None:
        returned.append(wrapped.apply_gradients([(tf.constant(1.0), v)]))

    repl.run(step_fn)
    assert set(returned) == {"mine"}


def test_a_weight_is_still_taken() -> None:
    repl = helpers.make(2)
    with repl.context():
        v, wrapped = tf.Variable(1.0), repl.wrap_optimizer(Clipping(1.0))

    def step_fn() -> None:
        r = repl.replica_id
        gradient = tf.constant([0.08, 0.0])[r]
        wrapped.apply_gradients([(gradient, v)], weight=[3.0, 1.0][r])

    repl.run(step_fn)
    assert float(v) == pytest.approx(1.0 - 0.06)


def test_a_weight_is_not_positional() -> None:
    """An argument that the optimizer itself would refuse may mean anything."""
    repl = helpers.make(2)
    with repl.context():
        v, wrapped = tf.Variable(1.0), repl.wrap_optimizer(kopt.SGD(1.0))
    gradient = tf.constant(1.0)
    for call in (
        lambda: wrapped.apply([gradient], [v], 0.5),
        lambda: wrapped.apply_gradients([(gradient, v)], 0.5),
    ):
        with pytest.raises(
            TypeError, match=r"(?s)apply.*positional.*test_overrides.py.*Fix: .*weight="
        ):
            repl.run(call)


def test_an_argument_that_nobody_takes_is_refused() -> None:
    repl = helpers.make(2)
    with repl.context():
        v, wrapped = tf.Variable(1.0), repl.wrap_optimizer(kopt.SGD(1.0))
    with pytest.raises(TypeError, match="apply.*boost"):
        repl.run(lambda: wrapped.apply([tf.constant(1.0)], [v], boost=1.0))
