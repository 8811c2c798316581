# SPDX-License-Identifier: Apache-2.0
"""Run-time errors that the caller survives leave all replicas equal.

One step holds each op that can fail at each possible place; a number selects the one
that fails next, on the last replica alone. A failure before the step has written
anything leaves everything as it was, and the next step is unaffected; a failure after a
write leaves the components of mirrored variables equal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

VARIABLES = ("mirrored", "sharded")

_ERRORS = (tf.errors.OpError,)


def _assert(bad: tf.Tensor) -> tf.Tensor:
    tf.debugging.Assert(tf.logical_not(bad), ["asserted"])
    return tf.zeros([])


def _python(bad: tf.Tensor) -> tf.Tensor:
    def fail(bad: np.bool_) -> np.float32:
        if bad:
            raise ValueError("in Python")
        return np.float32(0)

    return tf.ensure_shape(tf.numpy_function(fail, [bad], tf.float32), [])


def _gather(bad: tf.Tensor) -> tf.Tensor:
    return tf.gather(tf.zeros([2]), tf.where(bad, 7, 0))


def _numerics(bad: tf.Tensor) -> tf.Tensor:
    return tf.debugging.check_numerics(tf.where(bad, np.float32("nan"), 0.0), "nan")


def _reshape(bad: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.reshape(tf.zeros([4]), [2, tf.where(bad, 3, 2)]))


def _divide(bad: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.constant(0) // tf.where(bad, 0, 1), tf.float32)


def _broadcast(bad: tf.Tensor) -> tf.Tensor:
    larger = tf.maximum(tf.range(tf.where(bad, 3, 2)), [1, 0])  # that nothing can fold
    return tf.cast(tf.reduce_sum(larger) - 2, tf.float32)


OPS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "assert": _assert,
    "python": _python,
    "gather": _gather,
    "numerics": _numerics,
    "reshape": _reshape,
    "divide": _divide,
    "broadcast": _broadcast,
}
# The library's own checks.
CALLS = ("shapes differ", "branches differ")


class _Switch:
    """Selects the op that fails in the next step, and its delay."""

    def __init__(self) -> None:
        self.number = tf.Variable(0, dtype=tf.int32)
        self.seconds = 0.0
        self.names: list[str] = []  # each op's number is 1 more than its index

    def add(self, name: str) -> int:
        """Returns the number of an op, the same on all replicas."""
        if name not in self.names:
            self.names.append(name)
        return 1 + self.names.index(name)

    def wait(self, bad: np.bool_) -> np.bool_:
        """Runs in each step, before an op that may fail."""
        if bad:
            time.sleep(self.seconds)
        return bad


class _Failing:
    """A training step in which much can fail."""

    def __init__(self, repl: replicator.Replicator, names: Sequence[str]) -> None:
        self._repl = repl
        self._names = names
        self.switch = _Switch()
        layers = tf.keras.layers
        with repl.context():
            self.model = tf.keras.Sequential(
                [layers.Input([4]), layers.Dense(5), layers.BatchNormalization()]
            )
            tf.keras.utils.set_random_seed(1)
            self.optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.1))
            self.optimizer.build(self.model.trainable_variables)
            self.count = tf.Variable(0)
            self.metric = tf.Variable(
                0.0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        self.variables = [*self.model.variables, *self.optimizer.variables]
        self.variables = [getattr(v, "value", v) for v in self.variables]
        self.variables += [self.count]

    def _at(self, place: str) -> tf.Tensor:
        """Returns 0.0, or fails, by any of the ops."""
        value = tf.zeros([])
        for name in self._names:
            full = f"{place}: {name}"
            number = self.switch.add(full)
            last = self._repl.replica_id == self._repl.num_replicas - 1
            bad = tf.equal(self.switch.number, number) if last else tf.constant(False)
            if name not in CALLS:
                if last:
                    bad = tf.numpy_function(self.switch.wait, [bad], tf.bool)
                    value += OPS[name](tf.ensure_shape(bad, []))
            elif name == "shapes differ":
                size = tf.where(bad, 3, 2)
                value += tf.reduce_sum(self._repl.all_reduce(tf.zeros([size]), "sum"))
            else:
                value += tf.cond(
                    bad,
                    lambda: self._repl.all_reduce(tf.zeros([]), "sum"),
                    lambda: self._repl.all_reduce(tf.zeros([]), "sum"),
                )
        return value

    def __call__(self) -> tf.Tensor:
        at, true = self._at, helpers.opaque(True)
        replica = tf.cast(self._repl.replica_id, tf.float32)
        self.count.assign_add(1)
        x = tf.ones([3, 4]) * (1 + replica) + at("before")
        with tf.GradientTape() as tape:
            y = self.model(x, training=True) + at("after the statistics")
            loss = tf.reduce_sum(y * y * tf.constant([1.0, 2.0, 3.0, 4.0, 5.0]))
        beside = at("beside")
        beside += tf.cond(true, lambda: at("in a conditional"), lambda: tf.zeros([]))
        _, looped = tf.while_loop(
            lambda i, _: i < 2,
            lambda i, sum_: (i + 1, sum_ + at("in a loop")),
            (helpers.opaque(0), tf.zeros([])),
        )
        beside += looped + tf.function(lambda: at("in a function"))()
        weights = self.model.trainable_variables
        gradients = tape.gradient(loss, weights)
        between = at("between")
        self.metric.assign_add(tf.ones([]))
        self.optimizer.apply_gradients(
            (g + between if i == 0 else g, w)
            for i, (g, w) in enumerate(zip(gradients, weights, strict=True))
        )
        after = at("after the update")
        weight = tf.identity(weights[0])
        written = tf.gather(weight, tf.where(tf.equal(self.switch.number, -1), 9, 0))
        return loss + beside + after + tf.reduce_sum(0 * written)


class _World:
    """A step of `_Failing` in one of the three ways of running it."""

    def __init__(self, mode: str, names: Sequence[str], **options: Any) -> None:
        repl = helpers.make(2, build="trace", **options)
        if mode != "session":
            self.step = _Failing(repl, names)
            call = repl.build(self.step)
            self._call = tf.function(call) if mode == "function" else call
            self._session = None
            return
        with tf.Graph().as_default():
            self.step = _Failing(repl, names)
            self._fetches = repl.run(self.step)
            self._number = tf.compat.v1.placeholder(tf.int32, [])
            self._switch = self.step.switch.number.assign(self._number)
            self._session = tf.compat.v1.Session()
            self._session.run(tf.compat.v1.global_variables_initializer())
            self._session.run(tf.compat.v1.local_variables_initializer())

    def close(self) -> None:
        if self._session is not None:
            self._session.close()

    def run(self, number: int = 0, seconds: float = 0.0) -> np.ndarray:
        self.step.switch.seconds = seconds
        if self._session is None:
            self.step.switch.number.assign(number)
            return np.stack(self._call())
        self._session.run(self._switch, {self._number: number})
        return np.stack(self._session.run(self._fetches))

    def state(self) -> list[np.ndarray]:
        """Returns the values of all components of all variables."""
        every = [*self.step.variables, self.step.metric]
        components = [list(v.components) for v in every]
        if self._session is not None:
            components = self._session.run(components)
        return [np.stack(values) for values in components]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[_World]:
    mode, variables, names = request.param
    new_world = _World(mode, names, variables=variables)
    yield new_world
    new_world.close()


def _same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return [a.tobytes() for a in one] == [b.tobytes() for b in other]


def _check(world: _World, seconds: Sequence[float]) -> None:
    start = world.run()
    before = world.state()
    wrong = []
    for number, name in enumerate(world.step.switch.names, 1):
        for delay in seconds:
            with pytest.raises(_ERRORS):
                world.run(number, delay)
            after = world.state()
            equal = all((stacked == stacked[0]).all() for stacked in after[:-1])
            if not (equal and _same(before, after)):
                wrong.append((name, delay, "equal" if equal else "different"))
                before = after
    assert not wrong, wrong
    with pytest.raises(_ERRORS):
        world.run(-1)  # depends on earlier writes
    assert all((stacked == stacked[0]).all() for stacked in world.state()[:-1])
    assert np.isfinite(world.run()).all() and np.isfinite(start).all()


@pytest.mark.battery(3)
@pytest.mark.parametrize(
    "world",
    [
        *((mode, "mirrored", ("assert", "gather", *CALLS)) for mode in helpers.MODES),
        ("eager", "sharded", ("python", "reshape")),
    ],
    indirect=True,
    ids=[*(f"{mode}-mirrored" for mode in helpers.MODES), "eager-sharded"],
)
def test_a_step_that_fails_has_changed_nothing(world: _World) -> None:
    _check(world, [0.0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "world",
    [(m, v, (*OPS, *CALLS)) for m in helpers.MODES for v in VARIABLES],
    indirect=True,
    ids=[f"{m}-{v}" for m in helpers.MODES for v in VARIABLES],
)
def test_whatever_fails_wherever_it_fails_has_changed_nothing(world: _World) -> None:
    _check(world, [0.0, 0.02, 0.0])


def _around(place: str, step: Callable[[], Any], bad: tf.Tensor) -> None:
    """Runs steps in a function, and a failure before, after or between them."""
    if place == "a second step":
        step()
    if place == "before":
        tf.debugging.Assert(tf.logical_not(bad), ["before"])
    step()
    if place == "after":
        tf.debugging.Assert(tf.logical_not(bad), ["after"])


@pytest.mark.battery(3)
@pytest.mark.mirrored
@pytest.mark.parametrize("place", ["a second step", "before", "after"])
def test_what_fails_beside_a_step_in_a_function_leaves_replicas_equal(place) -> None:
    repl = helpers.make(2)
    with repl.context():
        variables = [tf.Variable(tf.zeros([50])) for _ in range(20)]
        count = tf.Variable(0)
    number = tf.Variable(-1)

    def step() -> None:
        before = count.read_value()
        for variable in variables:
            variable.assign_add(tf.ones([50]))
        count.assign_add(1)
        if repl.replica_id and place == "a second step":
            tf.debugging.Assert(tf.not_equal(before, number), ["a second step"])

    function = tf.function(
        lambda: _around(place, lambda: repl.run(step), tf.greater(number, -1))
    )
    function()
    steps = count.numpy()
    expected = {"a second step": 1, "before": 0, "after": 1}[place]
    for _ in range(5):
        number.assign(count.numpy() + (place == "a second step"))
        with pytest.raises(tf.errors.InvalidArgumentError):
            function()
        steps += expected
        values = {
            float(c) for v in variables for component in v.components for c in component
        }
        assert values == {float(steps)} == {float(c) for c in count.components}
    number.assign(-1)
    function()


@pytest.mark.battery(3)
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("name", ["assert", "gather", *CALLS])
def test_of_several_steps_per_call_those_before_the_failing_one_are_whole(
    name: str, turn: int, mode: str
) -> None:
    repl = helpers.make(2)
    with repl.context():
        variables = [tf.Variable(tf.zeros([5])) for _ in range(4)]
        count = tf.Variable(0)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
        optimizer.build(variables)
    failing = tf.Variable(-1)

    def fail() -> tf.Tensor:
        bad = tf.logical_and(tf.equal(count, failing), repl.replica_id == 1)
        if name == "shapes differ":
            size = tf.where(bad, 3, 2)
            return tf.reduce_sum(repl.all_reduce(tf.zeros([size]), "sum"))
        if name == "branches differ":
            zero = tf.zeros([])
            sums = [lambda: repl.all_reduce(zero, "sum") for _ in range(2)]
            return tf.cond(bad, *sums)
        return OPS[name](bad) if repl.replica_id else tf.zeros([])

    def step() -> tf.Tensor:
        value = fail()
        gradients = [-tf.ones([5]) for _ in variables]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        variables[0].assign_add(tf.zeros([5]))
        count.assign_add(1)
        return value

    call = repl.build(step, steps_per_call=3)
    run = tf.function(call) if mode == "function" else call
    run()
    failing.assign(3 + turn)
    with pytest.raises(_ERRORS):
        run()
    parts = [v.components for v in variables]
    steps = {float(x) for part in parts for x in np.ravel(part)}
    assert steps == {3.0 + turn} == {float(c) for c in count.components}
    failing.assign(-1)
    run()
    assert {float(x) for v in variables for x in v.numpy()} == {6.0 + turn}


def _rows(bad: tf.Tensor, none: int = 5) -> tf.IndexedSlices:
    """Returns rows of a variable of five rows, one of which does not exist if bad."""
    indices = tf.stack([0, tf.where(bad, none, 4)])
    return tf.IndexedSlices(tf.ones([2, 3]), indices, tf.constant([5, 3]))


def _fewer(bad: tf.Tensor) -> tf.IndexedSlices:
    """Returns rows of a variable, fewer than indices if bad."""
    return tf.IndexedSlices(tf.ones([tf.where(bad, 1, 2), 3]), tf.constant([0, 4]))


def _cut(bad: tf.Tensor) -> tf.Tensor:
    return tf.constant([5, 3])[: tf.where(bad, 1, 2)]


def _taller(bad: tf.Tensor) -> tf.Tensor:
    return tf.zeros([tf.where(bad, 6, 5), 3])


def _applied(
    optimizer: Any, gradient: Callable[[tf.Tensor], Any]
) -> Callable[..., Any]:
    """Returns a write by an optimizer, which is made under context()."""

    def make(repl: replicator.Replicator, variables: Sequence[Any]) -> Any:
        wrapped = repl.wrap_optimizer(optimizer())
        if hasattr(wrapped, "build"):
            wrapped.build(variables)

        def write(bad: tf.Tensor) -> None:
            gradients = [tf.ones([5, 3]), gradient(bad), tf.ones([5, 3])]
            wrapped.apply_gradients(zip(gradients, variables, strict=True))

        return write

    return make


def _written(method: str, value: Callable[[tf.Tensor], Any]) -> Callable[..., Any]:
    """Returns a write by a method of the second of three variables."""

    def make(repl: replicator.Replicator, variables: Sequence[Any]) -> Any:
        def write(bad: tf.Tensor) -> None:
            variables[0].assign_add(tf.ones([5, 3]))
            getattr(variables[1], method)(value(bad))
            variables[2].assign_add(tf.ones([5, 3]))

        return write

    return make


def _elements(repl: replicator.Replicator, variables: Sequence[Any]) -> Any:
    def write(bad: tf.Tensor) -> None:
        variables[0].assign_add(tf.ones([5, 3]))
        places = tf.stack([[0, 0], tf.stack([4, tf.where(bad, 3, 2)])])
        variables[1].scatter_nd_add(places, [1.0, 2.0])

    return write


PLACES = ("top", "branch")
# Writes that fail by themselves when they get bad input.
WRITES: dict[str, Callable[..., Any]] = {
    "keras sgd, rows": _applied(lambda: tf.keras.optimizers.SGD(0.1), _rows),
    "keras adam, rows": _applied(lambda: tf.keras.optimizers.Adam(0.1), _rows),
    "keras sgd, negative": _applied(
        lambda: tf.keras.optimizers.SGD(0.1), lambda bad: _rows(bad, -1)
    ),
    "v1 adagrad, rows": _applied(
        lambda: tf.compat.v1.train.AdagradOptimizer(0.1), _rows
    ),
    "v1 momentum, shape": _applied(
        lambda: tf.compat.v1.train.MomentumOptimizer(0.1, 0.9), _taller
    ),
    "assign, shape": _written("assign", _taller),
    "assign_add, shape": _written("assign_add", _taller),
    "assign, rank": _written("assign", lambda bad: tf.zeros(_cut(bad))),
    "assign_add, rank": _written("assign_add", lambda bad: tf.zeros(_cut(bad))),
    "v1 momentum, columns": _applied(
        lambda: tf.compat.v1.train.MomentumOptimizer(0.1, 0.9),
        lambda bad: tf.IndexedSlices(
            tf.ones([2, tf.where(bad, 4, 3)]), tf.constant([0, 4])
        ),
    ),
    "scatter_add": _written("scatter_add", _rows),
    "scatter_update": _written("scatter_update", _rows),
    "scatter_max": _written("scatter_max", lambda bad: _rows(bad, -1)),
    "scatter_add, fewer": _written("scatter_add", _fewer),
    "scatter_nd_add": _elements,
}


# Each write everywhere in functions; one of each kind in the other modes, too.
_WAYS = [
    (name, mode, place, "mirrored")
    for name in WRITES
    for mode in helpers.MODES
    for place in PLACES
    if mode == "function" or name in ("v1 momentum, shape", "assign, shape")
]
_WAYS += [(name, "function", "top", "sharded") for name in WRITES]


@pytest.mark.battery(10)
@pytest.mark.parametrize(("name", "mode", "place", "kept"), _WAYS)
def test_a_write_that_fails_itself_has_changed_nothing(
    name: str, mode: str, place: str, kept: str
) -> None:
    repl = helpers.make(2, variables=kept)
    with contextlib.ExitStack() as stack:
        if mode == "session":
            stack.enter_context(tf.Graph().as_default())
        bad = tf.Variable(False, trainable=False)
        with repl.context():
            variables = [tf.Variable(tf.ones([5, 3]) * (k + 1)) for k in range(3)]
            write = WRITES[name](repl, variables)

        def slow(x: np.ndarray) -> np.ndarray:
            time.sleep(0.05)
            return x

        def step() -> tf.Tensor:
            # Delays one replica's write; the others' would be done by then.
            delayed = tf.identity(bad)
            if repl.replica_id == 1:
                delayed = tf.ensure_shape(
                    tf.numpy_function(slow, [delayed], tf.bool), []
                )
            if place == "top":
                write(delayed)
                return tf.zeros([])

            def inside() -> tf.Tensor:
                write(delayed)
                return repl.all_reduce(1.0)

            return tf.cond(helpers.opaque(True), inside, lambda: 0.0)

        components = [list(v.components) for v in variables]
        if mode == "session":
            fetches = repl.run(step)
            assigned = {value: bad.assign(value) for value in (False, True)}
            session = stack.enter_context(tf.compat.v1.Session())
            session.run(tf.compat.v1.global_variables_initializer())
            _check_write(
                lambda: session.run(fetches),
                lambda value: session.run(assigned[value]),
                lambda: np.array(session.run(components)),
            )
        else:
            call = repl.build(step)
            run = tf.function(call) if mode == "function" else call
            _check_write(run, bad.assign, lambda: np.array(components))


def _check_write(
    run: Callable[[], Any],
    be_bad: Callable[[bool], Any],
    state: Callable[[], np.ndarray],
) -> None:
    run()
    before = state()
    be_bad(True)
    for _ in range(3):
        with pytest.raises(_ERRORS):
            run()
        np.testing.assert_array_equal(state(), before)
    be_bad(False)
    run()
    after = state()
    assert (after == after[:, :1]).all() and (after != before).any()
