# SPDX-License-Identifier: Apache-2.0
"""Unaggregated writes are equal on all replicas, or made so, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

import replicator
from replicator import ContextError, MismatchError
from tests import helpers

v1 = tf.compat.v1
kopt = keras.optimizers

# --- Correct optimizers need no communication -----------------------------------------


def _decay() -> Any:
    return kopt.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)


def _piecewise() -> Any:
    return kopt.schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.01, 0.001])


def _by_rate(rate: Any) -> Any:
    return kopt.Adam(lambda: tf.convert_to_tensor(rate))


RIGHT: dict[str, Callable[[], Any]] = {
    **{
        name: functools.partial(getattr(kopt, name), 0.1)
        for name in (
            "SGD Adam AdamW Adafactor Nadam Lion Ftrl Lamb Muon RMSprop Adagrad "
            "Adadelta Adamax ScheduleFreeAdamW"
        ).split()
        if hasattr(kopt, name)
    },
    "momentum": lambda: kopt.SGD(0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda: kopt.Adam(0.1, amsgrad=True),
    "centered": lambda: kopt.RMSprop(0.1, centered=True, momentum=0.1),
    "clipnorm": lambda: kopt.Adam(0.1, clipnorm=0.1),
    "clipvalue": lambda: kopt.Adam(0.1, clipvalue=0.1),
    "global_clipnorm": lambda: kopt.Adam(0.1, global_clipnorm=0.1),
    "ema": lambda: kopt.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "decay": lambda: kopt.SGD(0.1, weight_decay=0.01),
    "accumulation": lambda: kopt.Adam(0.1, gradient_accumulation_steps=2),
    "schedule": lambda: kopt.Adam(_decay()),
    "piecewise": lambda: kopt.Adam(_piecewise()),
    "cosine": lambda: kopt.SGD(kopt.schedules.CosineDecay(0.1, 5, warmup_steps=2)),
    "callable": lambda: kopt.Adam(lambda: 0.1),
    "eager": lambda: _by_rate(tf.constant(0.1)),
    "variable": lambda: _by_rate(tf.Variable(0.1)),
    "loss_scale": lambda: kopt.LossScaleOptimizer(kopt.Adam(0.1, clipnorm=1.0), 4.0, 1),
    "snt_adam": lambda: snt.optimizers.Adam(0.1),
    "snt_sgd": lambda: snt.optimizers.SGD(tf.Variable(0.1, trainable=False)),
    "snt_momentum": lambda: snt.optimizers.Momentum(0.1, 0.9),
    "snt_rms": lambda: snt.optimizers.RMSProp(0.1, centered=True),
    "legacy": lambda: tf_keras.optimizers.Adam(0.1, clipnorm=1.0),
    "old_legacy": lambda: tf_keras.optimizers.legacy.Adam(0.1),
    "v1_adam": lambda: v1.train.AdamOptimizer(0.1),
    "v1_tensor": lambda: v1.train.MomentumOptimizer(lambda: tf.constant(0.1) * 2, 0.9),
    "v1_rms": lambda: v1.train.RMSPropOptimizer(0.1),
    "v1_ftrl": lambda: v1.train.FtrlOptimizer(0.1),
    "v1_proximal": lambda: v1.train.ProximalAdagradOptimizer(0.1),
}


def _apply(optimizer: Any, grads: Any, variables: Any) -> Any:
    if not hasattr(optimizer, "apply"):
        return optimizer.apply_gradients(zip(grads, variables, strict=True))
    return optimizer.apply(grads, variables)


def _make_all(
    repl: replicator.Replicator, wrap: bool
) -> tuple[list[Any], Callable[[], Any]]:
    """Returns variables, and a step that updates each by another optimizer."""
    results = []
    for name, make in RIGHT.items():
        optimizer = make()
        if wrap:
            optimizer = repl.wrap_optimizer(optimizer)
        elif name == "loss_scale":
            continue  # scales by a Python constant until it is built
        is_keras = isinstance(optimizer, kopt.Optimizer)
        make_one = keras.Variable if is_keras else tf.Variable
        own_variables = [make_one([[1.0, 2.0], [3.0, 4.0]]), make_one([5.0, 6.0])]
        if is_keras:
            optimizer.build(own_variables)
        results.append((optimizer, own_variables))

    def step_fn() -> None:
        for optimizer, variables in results:
            grads = [tf.random.normal(variable.shape) for variable in variables]
            if not wrap:
                grads = repl.all_reduce(grads, "mean")
            _apply(optimizer, grads, variables)

    return results, step_fn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "wrap"),
    [
        ({}, True),
        ({"build": "clone"}, False),
        ({"variables": "sharded"}, False),
    ],
    ids=["wrapped", "by_hand", "by_hand_sharded"],
)
def test_right_optimizers_communicate_gradients_only(
    options: dict[str, str], wrap: bool
) -> None:
    repl = helpers.make(3 if "build" in options else 2, **options)
    with repl.context():
        variables, step_fn = _make_all(repl, wrap)
    step = repl.build(step_fn)
    for _ in range(3):
        step()
    assert len(step.plan) == len(variables)
    for _, variables_ in variables:
        helpers.assert_replicas_equal(variables_)


# --- Optimizers whose writes differ between replicas ----------------------------------


class Noisy(kopt.SGD):
    """Adds noise to each update."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        noise = tf.random.normal(variable.shape, dtype=variable.dtype)
        self.assign_sub(variable, (gradient + noise) * learning_rate)


class NoisyRows(kopt.SGD):
    """Adds noise to the rows of a sparse gradient."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        values = gradient.values + tf.random.normal([1, 2])
        rows = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        variable.scatter_sub(rows)


class Sonnet(tf.Module):
    """Like Sonnet's optimizers; with a rate that Python draws on each replica."""

    def apply(self, updates: Any, parameters: Any) -> None:
        for update, parameter in zip(updates, parameters, strict=True):
            rate = tf.numpy_function(np.random.uniform, [], tf.float64)
            parameter.assign_sub(update * tf.cast(rate, tf.float32))


def _rows() -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))


UNEVEN: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "noise": (lambda: Noisy(0.1), lambda: tf.ones([3, 2])),
    "scaled noise": (
        lambda: kopt.LossScaleOptimizer(Noisy(0.1), 1.0),
        lambda: tf.ones([3, 2]),
    ),
    "noisy rows": (lambda: NoisyRows(0.1), _rows),
    "python": (Sonnet, lambda: tf.ones([3, 2])),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("what", UNEVEN)
def test_what_an_optimizer_writes_unevenly_is_aggregated(what: str, steps: int) -> None:
    repl = helpers.make(2)
    make, gradient = UNEVEN[what]
    with repl.context():
        variable = tf.Variable(tf.ones([3, 2]))
        optimizer = repl.wrap_optimizer(make(), accumulation_steps=steps)
    for _ in range(2 * steps):
        repl.run(lambda: _apply(optimizer, [gradient()], [variable]) and None)
    helpers.assert_replicas_equal([variable])
    assert np.any(variable.numpy() != 1.0) and np.all(np.isfinite(variable.numpy()))


@pytest.mark.parametrize("mode", helpers.MODES)
def test_the_mean_of_uneven_writes_is_assigned(mode: str) -> None:
    """Even where the aggregation is the sum: each replica writes a full update."""

    class Uneven(kopt.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            noise = tf.random.stateless_uniform([], [1, repl.replica_id])
            self.assign_sub(variable, gradient + noise)

    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
        optimizer = repl.wrap_optimizer(Uneven(1.0))

        def step_fn() -> tf.Tensor:
            optimizer.apply([tf.constant(2.0)], [variable])
            return variable.read_value()

        return step_fn

    noise = [tf.random.stateless_uniform([], [1, r]).numpy() for r in range(2)]
    result = helpers.run(mode, repl, make_step)
    np.testing.assert_allclose(result, [1.0 - 2.0 - np.mean(noise)] * 2, rtol=1e-6)


def _noisy_v1() -> Any:
    rate = lambda: tf.random.uniform([])  # noqa: E731
    return v1.train.GradientDescentOptimizer(rate)


class CountsUnevenly(kopt.SGD):
    """Counts by an integer that only the replica knows."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate)
        self.iterations.assign_add(tf.cast(tf.random.uniform([]) * 100, tf.int32))


@pytest.mark.parametrize(
    ("make", "name", "op"),
    [
        (_noisy_v1, "GradientDescentOptimizer", "ResourceApplyGradientDescent"),
        (lambda: CountsUnevenly(0.1), "CountsUnevenly", "AssignVariableOp"),
    ],
    ids=["v1", "integers"],
)
def test_what_cannot_be_aggregated_is_refused(make: Any, name: str, op: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(1.0)
        optimizer = repl.wrap_optimizer(make())
    with pytest.raises(
        ContextError,
        match=rf"(?s)optimizer {name} writes variable \S+ by {op}.*test_drift.py:\d+.*"
        r"differ by RandomUniform .*test_drift.py:\d+.*Fix: .*repl.broadcast",
    ):
        repl.run(lambda: _apply(optimizer, [tf.constant(1.0)], [variable]) and None)
    assert variable.numpy() == 1.0


@pytest.mark.battery(5)
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
@pytest.mark.parametrize(
    "name", ["Adam", "snt_adam", "v1_adam", "loss_scale", "legacy", "old_legacy"]
)
def test_optimizers_that_are_not_wrapped(name: str, variables: str) -> None:
    """Correct if gradients are equal on all replicas, as on one device."""
    repl, plain = helpers.make(2, variables=variables), helpers.make(1)
    results = []
    for one in (repl, plain):
        with one.context():
            variable = keras.Variable([1.0, 2.0], name="w").value
            optimizer = RIGHT[name]()
        results.append((optimizer, variable))

    def step_fn(k: int, one: Any, combine: bool = True) -> None:
        optimizer, variable = results[k]
        gradient = tf.constant([1.0, -3.0])
        if k == 0:
            gradient *= 0.5 + tf.cast(one.replica_id, tf.float32)
        combined = one.all_reduce(gradient, "mean") if combine else gradient
        _apply(optimizer, [combined], [variable])

    for _ in range(2):
        repl.run(lambda: step_fn(0, repl))
        plain.run(lambda: step_fn(1, plain))
    helpers.assert_replicas_equal([results[0][1]])
    np.testing.assert_array_equal(results[0][1].numpy(), results[1][1].numpy())
    before = results[0][1].numpy()
    with pytest.raises(ContextError, match=r"(?s)at \S*test_drift.py:\d+.*Fix: wrap"):
        repl.run(lambda: step_fn(0, repl, combine=False))
    np.testing.assert_array_equal(before, results[0][1].numpy())


@pytest.mark.parametrize("name", ["Adam", "v1_adam"])
def test_the_lines_of_all_replicas_are_named_where_they_differ(name: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable([1.0])
        optimizer = RIGHT[name]()

    def step_fn() -> None:
        if repl.replica_id == 0:
            optimizer.apply_gradients([(tf.constant([1.0]), variable)])
        else:
            optimizer.apply_gradients([(tf.constant([2.0]), variable)])

    first = step_fn.__code__.co_firstlineno
    lines = [rf"\S+test_drift.py:{first + n} in step_fn" for n in (2, 4)]
    with pytest.raises(
        ContextError,
        match=rf"(?s)replica 0: at {lines[0]}\s+replica 1: at {lines[1]}"
        rf".*replica 0: the value is that of Const \S+ at {lines[0]}"
        rf".*replica 1: the value is that of Const \S+ at {lines[1]}.*Fix: wrap",
    ):
        repl.run(step_fn)


# --- Writes of different variables, or by different methods ---------------------------


def _two(repl: Any, dtype: Any, **facts: Any) -> tuple[Any, Any]:
    with repl.context():
        return tuple(tf.Variable([0, 0], name=n, dtype=dtype, **facts) for n in "ab")


_AGGREGATION = tf.VariableAggregation
_ROWS = tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]))

Write = Callable[[Any, Any], Any]


def _a(a: Any, b: Any) -> Any:
    return a.assign([1, 1])


def _b(a: Any, b: Any) -> Any:
    return b.assign([1, 1])


def _more(a: Any, b: Any) -> Any:
    return a.assign_add([1, 1])


def _in_branch(write: Write, otherwise: Write = lambda a, b: a) -> Write:
    yes = lambda: helpers.opaque(True)  # noqa: E731
    return lambda a, b: tf.cond(yes(), lambda: write(a, b), lambda: otherwise(a, b))


_SUM = {"aggregation": _AGGREGATION.SUM}
_FIRST = {"aggregation": _AGGREGATION.ONLY_FIRST_REPLICA}
_INTEGERS = {"dtype": tf.int32}
_ROW: Write = lambda a, b: a.scatter_add(_ROWS)  # noqa: E731
MISPAIRED: dict[str, tuple[dict[str, Any], Write, Write]] = {
    "variables": ({}, _a, _b),
    "methods": ({}, _a, _more),
    "parts": ({}, _ROW, lambda a, b: b.scatter_add(_ROWS)),
    "methods of parts": ({}, _ROW, lambda a, b: a.scatter_update(_ROWS)),
    "sums": (_SUM, _a, _b),
    "the first replica's": (_FIRST, _a, _b),
    "the order": (
        {},
        lambda a, b: (_a(a, b), _b(a, b)),
        lambda a, b: (_b(a, b), _a(a, b)),
    ),
    "integers": (_INTEGERS, _a, _b),
    "methods of integers": (_INTEGERS, _a, _more),
    "integers in a branch": (_INTEGERS, _in_branch(_a), _in_branch(_b)),
    "the other branch": (_INTEGERS, _in_branch(_a), _in_branch(lambda a, b: a, _a)),
    "integers, more often": (_INTEGERS, lambda a, b: _more(_more(a, b), b), _more),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    "options",
    [{}, {"check": True}, {"variables": "sharded"}],
    ids=["mirrored", "check", "sharded"],
)
@pytest.mark.parametrize("what", MISPAIRED)
def test_replicas_that_write_otherwise_are_refused(
    what: str, options: dict[str, Any]
) -> None:
    facts, *writes = MISPAIRED[what]
    repl = helpers.make(2, **options)
    a, b = _two(repl, **{"dtype": tf.float32, **facts})

    def step_fn() -> None:
        writes[repl.replica_id](a, b)

    with pytest.raises(
        MismatchError,
        match=r"(?s)(the same assignment|write variable|has no partner).*replica 0.*"
        r"test_drift.py:\d+.*replica 1.*Fix: ",
    ):
        repl.run(step_fn)
    for variable in (a, b):
        assert not np.any(helpers.components(variable))


def test_both_variables_methods_and_lines_are_named() -> None:
    for dtype in (tf.float32, tf.int32):
        repl = helpers.make(2)
        a, b = _two(repl, dtype)

        def step_fn(a: Any = a, b: Any = b, repl: Any = repl) -> None:
            (b.assign_add if repl.replica_id else a.assign)([1, 1])

        with pytest.raises(
            MismatchError,
            match=r"(?s)replica 0.*(a:0.assign|1 writes, here AssignVar).*test_drift.py"
            r".*replica 1.*(b:0.assign_add|writes b:0 by AssignAdd).*test_drift.py",
        ):
            repl.run(step_fn)


def test_variables_of_one_name_are_told_apart() -> None:
    repl = helpers.make(2)
    with repl.context():
        both = [tf.Variable(1.0, name="w") for _ in range(2)]
    with pytest.raises(MismatchError, match="not the same variable .two are called w:"):
        repl.run(lambda: both[repl.replica_id].assign(2.0))


def test_other_orders_of_integers_are_right() -> None:
    repl = helpers.make(2)
    a, b = _two(repl, tf.int32)

    def step_fn() -> None:
        for variable in [b, a] if repl.replica_id else [a, b]:
            variable.assign_add([1, 2])

    repl.run(step_fn)
    helpers.assert_replicas_equal([a, b])


# --- Writes that only some replicas reach ---------------------------------------------


def _if(then: Callable[[], Any]) -> Any:
    equal = tf.random.stateless_uniform([], [1, 2])  # on all replicas
    return tf.cond(equal < 2.0, lambda: (then(), 0)[1], lambda: 0)


_WRAPPED: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "in itself": lambda write: write(),
    "in a function": lambda write: tf.function(lambda: (write(), 0)[1])(),
    "in a branch": _if,
    "in a branch of a function": lambda write: tf.function(lambda: _if(write))(),
    "in a loop": lambda write: tf.while_loop(
        lambda n: n < 2, lambda n: (write(), n + 1)[1:], [0]
    ),
    "in the condition of a loop": lambda write: tf.while_loop(
        lambda n: (write(), n < 2)[1], lambda n: n + 1, [0]
    ),
}


@pytest.mark.parametrize("around", _WRAPPED)
@pytest.mark.parametrize("what", ["method", "op"])
def test_a_branch_that_some_replicas_take_is_found_around_all_else(
    what: str, around: str
) -> None:
    """However deep in it the write is."""
    repl = helpers.make(2)
    with repl.context():
        count = tf.Variable([0, 0], name="count")

    def write() -> None:
        if what == "method":
            count.assign_add([1, 1])
        else:
            tf.raw_ops.AssignAddVariableOp(resource=count.handle, value=[1, 1])

    def step_fn() -> None:
        own = helpers.opaque(float(repl.replica_id))
        tf.cond(own > 0.0, lambda: (_WRAPPED[around](write), 0)[1], lambda: 0)

    error, says = {
        "method": (tf.errors.InvalidArgumentError, "replicas disagree in a cond"),
        "op": (ContextError, r"writes variable count:0 by AssignAdd.*drift apart"),
    }[what]
    with pytest.raises(error, match=rf"(?s){says}.*test_drift\.py.*Fix: "):
        repl.run(step_fn)
    assert not np.any(helpers.components(count))


def test_writes_in_a_loops_condition_are_compared() -> None:
    repl = helpers.make(2)
    with repl.context():
        count = tf.Variable([0, 0])

    def step_fn() -> None:
        own = helpers.opaque(2 + repl.replica_id)

        def condition(n: tf.Tensor) -> tf.Tensor:
            count.assign_add([1, 1])
            return n < own

        tf.while_loop(condition, lambda n: n + 1, [0])

    with pytest.raises(tf.errors.InvalidArgumentError, match="disagree in a loop"):
        repl.run(step_fn)
    helpers.assert_replicas_equal([count])
