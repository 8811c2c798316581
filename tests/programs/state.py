# SPDX-License-Identifier: Apache-2.0
"""Variables and loop variables of all kinds beside communication in control flow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import Replicator
from tests import helpers
from tests.programs.program import (
    ASKS,
    NO_SESSION,
    ONE_PROCESS,
    Step,
    program,
    rows,
)


def _ids(count: int) -> np.ndarray:
    """Returns what `own` gives to the replicas."""
    return np.arange(1.0, count + 1.0)


def _total(count: int) -> float:
    return _ids(count).sum()


def _own_value(value: float) -> tf.Variable:
    """A variable with a different value on each replica."""
    return tf.Variable(
        value,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


def _loop(iterations: int, body: Callable[..., Any], *start: Any) -> Any:
    """Returns the loop variables after so many calls of the body."""
    count = tf.constant(0)
    results = tf.while_loop(
        lambda n, *_: n < iterations,
        lambda n, *values: (n + 1, *body(n, *values)),
        [count, *start],
    )
    return results[1:]


# --- Variables ------------------------------------------------------------------------


def _moving_average(count: int) -> list[float]:
    average, mean = 0.0, _total(count) / count
    for _ in range(3):
        for k in range(3):
            average = 0.5 * average + 0.5 * mean * 2**k
    return [average] * count


@program(_moving_average, steps=3)
def moving_average_in_a_loop(repl: Replicator) -> Step:
    average = tf.Variable(0.0)

    def body(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor]:
        average.assign(0.5 * average + 0.5 * repl.all_reduce(x, "mean"))
        return (2.0 * x,)

    def step(x: tf.Tensor) -> tf.Tensor:
        _loop(3, body, x)
        return average.read_value()

    return step


def _kept_order(count: int) -> list[np.ndarray]:
    value = np.ones(count)
    for _ in range(2):
        seen = [value]
        value = value + _ids(count)
        for _ in range(2):
            value = value + value.sum()
            seen.append(value)
        value = value + 1.0
        seen.append(value)
    return seen


def _in_order(place: str, repl: Replicator) -> Step:
    variable = _own_value(1.0)

    def grow() -> tf.Tensor:
        variable.assign_add(repl.all_reduce(variable.read_value()))
        return variable.read_value()

    inside = {
        "conditional": lambda: tf.cond(helpers.opaque(True), grow, lambda: -1.0),
        "switch": lambda: tf.switch_case(helpers.opaque(1), [lambda: -1.0, grow]),
        "function": tf.function(grow),
        "loop": lambda: _loop(1, lambda n, _: (grow(),), 0.0)[0],
    }[place]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        before = variable.read_value()
        variable.assign(before + x)
        seen = [before, inside(), inside()]
        variable.assign_add(1.0)
        return [*seen, variable.read_value()]

    return step


for _place in ("loop", "conditional", "function", "switch"):
    program(_kept_order, steps=2, name=f"reads_and_writes_in_a_{_place}")(
        functools.partial(_in_order, _place)
    )


@program(lambda count: [1.0 + 2.0 * count] * count, steps=3)
def what_nobody_uses_is_written(repl: Replicator) -> Step:
    variable = tf.Variable(1.0)

    def step(x: tf.Tensor) -> tf.Tensor:
        before = variable.read_value()

        def write() -> tf.Tensor:
            variable.assign(variable + repl.all_reduce(1.0))
            return before

        tf.cond(helpers.opaque(True), write, lambda: before)
        return before

    return step


@program(lambda count: [25.0 * count * _total(count)] * count)
def variable_created_in_a_loop(repl: Replicator) -> Step:
    variables: list[tf.Variable] = []

    def body(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor]:
        if not variables:
            variables.append(tf.Variable(5.0))
        return (repl.all_reduce(x * variables[0]),)

    return lambda x: _loop(2, body, x)[0]


@program(
    lambda count: (
        [np.mean(_ids(count)) * np.mean([_total(count), 2 * _total(count)])] * count
    ),
    NO_SESSION,
)
def metric_updated_in_a_loop(repl: Replicator) -> Step:
    metric = tf.keras.metrics.Mean()

    def step(x: tf.Tensor) -> tf.Tensor:
        def body(n: tf.Tensor) -> tuple[()]:
            factor = tf.cast(n + 1, x.dtype)
            metric.update_state(repl.all_reduce(factor * x) * x)
            return ()

        _loop(2, body)
        return metric.result()

    return step


@program(lambda count: ([4.0 * count * _total(count)] * count,) * 2)
def gradients_of_a_variable_read_in_a_loop(repl: Replicator) -> Step:
    """d sum(y) / d w is that of count * count * w * w * sum(x), a share for each."""
    weight = tf.Variable(2.0)

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = _loop(2, lambda n, y: (weight * repl.all_reduce(y),), x)[0]
        return y, tape.gradient(y, weight)

    return step


def _sparse_gradients(count: int) -> Any:
    gradients = np.zeros([count, 8, 2])
    for r in range(count):
        for n in range(3):
            gradients[r, [r + n, r + n + 1]] += count * 2 * 4 * count
    return [3.0 * (4 * count) ** 2] * count, list(gradients)


@program(_sparse_gradients)
def sparse_gradients_through_a_loop(repl: Replicator) -> Step:
    table = tf.Variable(tf.ones([8, 2]))

    def step(x: tf.Tensor) -> Any:
        def body(n: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor]:
            rows = tf.gather(table, tf.cast(x, tf.int32) + [n - 1, n])
            return (y + repl.all_reduce(tf.reduce_sum(rows)) ** 2,)

        with tf.GradientTape() as tape:
            (y,) = _loop(3, body, 0.0)
        return y, tf.convert_to_tensor(tape.gradient(y, table))

    return step


def _slices_in_a_loop(count: int) -> list[np.ndarray]:
    table = np.ones([6, 2])
    for r in range(count):
        table[[r, r + 1]] -= 3
    return [table] * count


@program(_slices_in_a_loop)
def slices_all_reduced_in_a_loop(repl: Replicator) -> Step:
    table = tf.Variable(tf.ones([6, 2]))

    def step(x: tf.Tensor) -> tf.Tensor:
        def body(n: tf.Tensor) -> tuple[()]:
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(tf.gather(table, tf.cast(x, tf.int32) - [1, 0]))
            gradient = repl.all_reduce(tape.gradient(y, table))
            assert isinstance(gradient, tf.IndexedSlices)
            table.assign_sub(tf.convert_to_tensor(gradient))
            return ()

        _loop(3, body)
        return table.read_value()

    return step


def _after_a_method(count: int) -> Any:
    """y_r = 5 w x_r sum(x); d sum(y) / d w in all: 5 sum(x) sum(x)."""
    x, total = _ids(count), _total(count)
    weight = 2.0 - 0.1 * 5 * total**2
    return 10 * x * total, 10 * (total + x.sum()) * np.ones(count), weight * x * total


@program(_after_a_method)
def method_with_a_variable(repl: Replicator) -> Step:
    class Layer(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(2.0)

        @tf.function
        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            return repl.all_reduce(x * self.weight) * x

    layer = Layer()

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x) + layer(2.0 * x)
        dx, dw = tape.gradient(y, [x, layer.weight])
        layer.weight.assign_sub(0.1 * repl.all_reduce(dw))
        return y, dx, layer(x)

    return step


# --- Loop variables -------------------------------------------------------------------


def _kinds(count: int) -> Any:
    text = b"a" + b"x" * 3
    return [3] * count, [False] * count, [text] * count, [3 * count**3] * count


@program(_kinds, ONE_PROCESS)  # text
def loop_of_integers_truth_and_text(repl: Replicator) -> Step:
    def body(n: Any, go: Any, text: Any, x: Any) -> Any:
        go = repl.all_reduce(tf.logical_and(go, n < 2), "min")
        return n + 1, go, repl.broadcast(text) + "x", repl.all_reduce(x)

    def step(x: tf.Tensor) -> Any:
        text = tf.strings.substr("abcd", tf.cast(x, tf.int32) - 1, 1)
        start = [tf.constant(0), tf.constant(True), text, tf.constant(3)]
        return tf.while_loop(lambda n, go, text, x: go, body, start)

    return step


@program(
    lambda count: (
        [(_total(count) * np.array([1.0, 2.0, 3.0])) ** 2] * count,
        [2 * count * _total(count) * np.array([1.0, 2.0, 3.0])] * count,
    )
)
def tensor_arrays_and_their_gradients(repl: Replicator) -> Step:
    def step(x: tf.Tensor) -> Any:
        x = tf.constant([1.0, 2.0, 3.0]) * x
        with tf.GradientTape() as tape:
            tape.watch(x)
            array = tf.TensorArray(tf.float32, size=3).unstack(x)

            def body(n: tf.Tensor, made: Any) -> tuple[Any]:
                return (made.write(n, repl.all_reduce(array.read(n)) ** 2),)

            y = _loop(3, body, tf.TensorArray(tf.float32, size=3))[0].stack()
        return y, tape.gradient(y, x)

    return step


@program(lambda count: [[_total(count) + n * count for n in range(3)]] * count)
def tensor_array_that_grows(repl: Replicator) -> Step:
    def step(x: tf.Tensor) -> tf.Tensor:
        def body(n: tf.Tensor, made: Any) -> tuple[Any]:
            return (made.write(n, repl.all_reduce(tf.cast(n, tf.float32) + x)),)

        array = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
        return _loop(3, body, array)[0].stack()

    return step


def _growing(count: int) -> Any:
    xs = [tf.fill([r], float(r)) for r in range(1, count + 1)]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        ys = xs
        for _ in range(2):
            ys = [tf.concat([y, *ys], 0) for y in ys]
        loss = tf.add_n([tf.reduce_sum(y**2) for y in ys])
    return ys, tape.gradient(loss, xs)


@program(_growing)
def shapes_that_grow_and_differ_by_replica(repl: Replicator) -> Step:
    def body(n: tf.Tensor, y: tf.Tensor) -> Any:
        return n + 1, tf.concat([y, repl.all_gather(y, axis=0)], 0)

    def step(x: tf.Tensor) -> Any:
        x = helpers.opaque(tf.fill([tf.cast(x, tf.int32)], x), [None])
        with tf.GradientTape() as tape:
            tape.watch(x)
            shapes = [tf.TensorShape([]), tf.TensorShape([None])]
            start = [tf.constant(0), x]
            y = tf.while_loop(lambda n, y: n < 2, body, start, shapes)[1]
            loss = tf.reduce_sum(y**2)
        return y, tape.gradient(loss, x)

    return step


@program(
    lambda count: [
        _total(count) * count * np.array([[1.0, 0.0], [2.0, 3.0]]) for _ in range(count)
    ]
)
def ragged_tensors_in_a_loop(repl: Replicator) -> Step:
    def body(n: tf.Tensor, ragged: tf.RaggedTensor) -> tuple[tf.RaggedTensor]:
        return (ragged.with_flat_values(repl.all_reduce(ragged.flat_values)),)

    def step(x: tf.Tensor) -> tf.Tensor:
        values = helpers.opaque([1.0, 2.0, 3.0]) * x
        ragged = tf.RaggedTensor.from_row_lengths(values, [1, 2])
        return _loop(2, body, ragged)[0].to_tensor()

    return step


@program(lambda count: [2 * count * x * np.diag([1.0, 2.0]) for x in _ids(count)])
def jacobian_row_by_row(repl: Replicator) -> Step:
    def step(x: tf.Tensor) -> tf.Tensor:
        x = helpers.opaque([1.0, 2.0]) * x
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x**2)
        return tape.jacobian(y, x, experimental_use_pfor=False)

    return step


def _square_gradient(repl: Replicator, x: tf.Tensor) -> Callable[[], tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = repl.all_reduce(x * x)
    return lambda: tape.gradient(y, x)


@program(lambda count: 2 * count * _ids(count))
def gradient_taken_in_a_conditional(repl: Replicator) -> Step:
    """Of a call outside of it."""

    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.cond(helpers.opaque(True), _square_gradient(repl, x), lambda: x)

    return step


@program(lambda count: 2 * count * _ids(count))
def gradient_taken_in_a_loop(repl: Replicator) -> Step:
    return lambda x: _loop(1, lambda n, x: (_square_gradient(repl, x)(),), x)[0]


@program(lambda count: [count**3] * count)
def broadcast_reduced_in_a_loop(repl: Replicator) -> Step:
    """The sum of one tensor with itself: Grappler's version of it hung in a loop."""

    def body(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor]:
        return (repl.all_reduce(repl.broadcast(x, root=0)),)

    return lambda x: _loop(3, body, x)[0]


@program(lambda count: [8.0, 5.0], ASKS, replicas=(2,))
def messages_back_and_forth_in_a_loop(repl: Replicator) -> Step:
    """Replica 0 has 1, 2, 4, 8; replica 1 has one more than replica 0 had."""
    spec = tf.TensorSpec([], tf.float32)

    def body(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor]:
        if repl.replica_id == 0:
            repl.send(x, 1)
            return (repl.recv(spec, 1),)
        received = repl.recv(spec, 0)
        repl.send(2.0 * received, 0)
        return (received + 1.0,)

    return lambda x: _loop(3, body, x)[0]


# --- Functions ------------------------------------------------------------------------


@program(lambda count: ([float(count)] * count, [5.0 * count] * count), ASKS)
def gradients_of_a_function_in_any_order(repl: Replicator) -> Step:
    function = tf.function(repl.all_reduce)

    def step(x: tf.Tensor) -> Any:
        xs = [x, 10.0 * x]
        with tf.GradientTape() as tape:
            tape.watch(xs)
            ys = [function(xs[0]), 5.0 * function(xs[1])]
        return tape.gradient(ys[:: -1 if repl.replica_id else 1], xs)

    return step


@program(
    lambda count: ([[1.0] * (2 * count)] * count, [[2.0] * (3 * count - 1)] * count),
    ASKS,
)
def function_with_another_number_of_traces(repl: Replicator) -> Step:
    function = tf.function(lambda x: repl.all_gather(x, axis=0))

    def step(x: tf.Tensor) -> Any:
        first = function(tf.fill([2], 1.0))
        second = function(tf.fill([3 if repl.replica_id else 2], 2.0))
        return first, second

    return step


@program(
    lambda count: (
        _total(count) ** 3 * _ids(count),
        [4 * _total(count) ** 3] * count,
    ),
    ONE_PROCESS,
)
def concrete_function_called_twice(repl: Replicator) -> Step:
    """y_r = x_r s for s = sum(x); z_r = sum(y) y_r; d sum(z) = d s**4."""

    def step(x: tf.Tensor) -> Any:
        function = tf.function(lambda x: repl.all_reduce(x) * x)
        concrete = function.get_concrete_function(tf.TensorSpec([], tf.float32))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = concrete(concrete(x))
        return y, tape.gradient(y, x)

    return step


@program(
    lambda count: (
        (_ids(count) ** 2).sum() * _ids(count),
        (_ids(count) ** 2).sum() + 2 * _total(count) * _ids(count),
    )
)
def forward_mode_in_a_function(repl: Replicator) -> Step:
    function = tf.function(lambda x: repl.all_reduce(x * x) * x)

    def step(x: tf.Tensor) -> Any:
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as accumulator:
            y = function(x)
        return y, accumulator.jvp(y)

    return step


@program(lambda count: [8] * 2 + [1] * (count - 2), ASKS, replicas=(3, 4))
def integers_that_a_group_reduces_in_a_loop(repl: Replicator) -> Step:
    """Integers are on no tape, but are in a loop that two tapes wrap all the same."""

    def step(x: tf.Tensor) -> tf.Tensor:
        total = tf.constant(1)
        with tf.GradientTape() as outer, tf.GradientTape() as inner:
            outer.watch(x)
            inner.watch(x)
            if repl.replica_id < 2:
                group = repl.group([0, 1])
                total, _ = _loop(
                    3, lambda k, n, y: (repl.all_reduce(n, group=group), y), total, x
                )
        return total

    return step


@program(
    lambda count: ([6.0, 6.0, 21.0, 28.0], [4.0, 4.0, 14.0, 14.0]), ASKS, replicas=(4,)
)
def groups_take_their_own_branches(repl: Replicator) -> Step:
    groups = repl.groups([[0, 1], [2, 3]])

    def step(x: tf.Tensor) -> Any:
        large = repl.all_reduce(x, group=groups) > 4.0
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(
                large,
                lambda: repl.all_reduce(x, group=groups) * x,
                lambda: repl.all_reduce(2.0 * x, group=groups),
            )
        return y, tape.gradient(y, x)

    return step


@program(lambda count: [2.0, 2.0, 4.0, 4.0], ASKS, replicas=(4,))
def groups_make_their_own_iterations(repl: Replicator) -> Step:
    groups = repl.groups([[0, 1], [2, 3]])

    def step(x: tf.Tensor) -> tf.Tensor:
        turns = tf.cast(x + 1, tf.int32) // 2
        return tf.while_loop(
            lambda n, y: n < turns,
            lambda n, y: (n + 1, repl.all_reduce(y, group=groups)),
            [tf.constant(0), helpers.opaque(1.0)],
        )[1]

    return step


@program(
    lambda count: [_iterated(count)] * count,
    NO_SESSION,
)
def for_over_an_iterator(repl: Replicator) -> Step:
    def step(x: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0, tf.int64)
        for n in iter(tf.data.Dataset.range(3)):
            total = repl.all_reduce(total + n * tf.cast(x, tf.int64))
        return total

    return step


def _iterated(count: int) -> float:
    total = 0.0
    for n in range(3):
        total = count * total + n * _total(count)
    return total


@program(
    lambda count: (
        [[3.0 + 3.0 * count] * 4] * count,
        [
            [(3.0 + 3.0 * count) * (np.random.default_rng(r).standard_normal() > 0)] * 4
            for r in range(count)
        ],
    ),
    inputs=rows,
)
def variables_on_replicas_devices(repl: Replicator) -> Step:
    """An op of replica 0 on its own device may be there for a variable's sake."""
    owned = [tf.Variable([float(k)] * 4) for k in range(3)]

    def step(x: tf.Tensor) -> Any:
        for v in owned:
            v.assign_add(repl.all_reduce(tf.ones([4])))
        positive = x[0, 0] > 0.0
        branch = tf.cond(positive, lambda: tf.add_n([*owned]), lambda: owned[0] * 0.0)
        return tf.add_n([v.read_value() for v in owned]), branch

    return step


@program(None, inputs=rows, steps=3)
def made_and_accumulated_in_a_step(repl: Replicator) -> Step:
    w = tf.Variable([0.5, 1.0, -1.0, 2.0])
    optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.1), accumulation_steps=2)
    made: list[tf.Variable] = []

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if not made:
            made.append(_own_value(0.0))
        made[0].assign_add(1.0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * w)
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        return made[0].read_value(), w.read_value()

    return step


def _in_functions(count: int) -> Any:
    """y = w w (x + 2 x) for w = 2; its derivative by w is 2 w 3 x."""
    x = _ids(count)
    return 12.0 * x, 12.0 * x, 3.0 * x


@program(_in_functions)
def nested_function_with_variables(repl: Replicator) -> Step:
    weight, count = tf.Variable(2.0), _own_value(0.0)

    @tf.function
    def helper(x: tf.Tensor) -> tf.Tensor:
        count.assign_add(x)
        return weight * weight * x

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = helper(x) + helper(2.0 * x)
        gradient = tape.gradient(y, weight)
        weight.assign_sub(repl.all_reduce(gradient, "mean") / 24.0)
        return y, gradient, count.read_value()

    return step


def _python(x: Any) -> Any:
    """Control flow of Python's, which AutoGraph converts where x is a tensor."""
    if x > 2.0:
        while x > 1.0:
            x = x / 2.0
        y = x
    else:
        y = x * 10.0
    for k in tf.range(3):
        if k == 1:
            continue
        y += tf.cast(k, tf.float32)
    return y


@program(
    lambda count: (
        [sum(float(_python(x)) for x in _ids(count))] * count,
        [_python(x) for x in _ids(count)],
    ),
    NO_SESSION,
)
def python_that_autograph_converts(repl: Replicator) -> Step:
    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        y = _python(x)
        return repl.all_reduce(y, "sum"), y

    return step


# --- Forward and reverse mode ---------------------------------------------------------

Outputs = Callable[[Any], tf.Tensor]


def _forward(f: Outputs, w: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(w, tf.constant([1.0, 0.5])) as accumulator:
        y = f(w)
    return accumulator.jvp(y)


def _reverse(f: Outputs, w: Any) -> Any:
    with tf.GradientTape() as tape:
        y = f(w)
    return tf.convert_to_tensor(tape.gradient(y, w))


def _jacobian(f: Outputs, w: Any) -> Any:
    with tf.GradientTape() as tape:
        y = f(w)
    return tape.jacobian(y, w)


DERIVATIVES: list[Callable[[Outputs, Any], Any]] = [
    lambda f, w: _forward(lambda w: _reverse(f, w), w),
    lambda f, w: _reverse(lambda w: _forward(f, w), w),
    lambda f, w: _reverse(lambda w: _reverse(lambda w: _forward(f, w), w) ** 2, w),
    lambda f, w: _jacobian(lambda w: _forward(f, w), w),
    lambda f, w: _forward(lambda w: _jacobian(f, w), w),
]
_START = [1.0, 2.0]


def _numbers(x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.range(6.0) / 10, [3, 2]) + x


def _of_one(x: tf.Tensor, w: Any) -> list[tf.Tensor]:
    f = lambda w: tf.tanh(tf.linalg.matvec(_numbers(x), w))  # noqa: E731
    return [derivative(f, w) for derivative in DERIVATIVES]


def _of_each(count: int) -> list[list[tf.Tensor]]:
    own = [_of_one(x, tf.Variable(_START)) for x in range(1, count + 1)]
    return [list(column) for column in zip(*own, strict=True)]


@program(_of_each, close=1e-4)
def forward_and_reverse_mode(repl: Replicator) -> Step:
    """TensorFlow computes each op's derivative by a function, and differentiates it."""
    w = tf.Variable(_START)
    return lambda x: _of_one(x, w)


def _of_mean(x: tf.Tensor, mean: Outputs, w: Any) -> tf.Tensor:
    def loss(w: Any) -> tf.Tensor:
        y = mean(tf.reduce_mean(tf.tanh(tf.linalg.matvec(_numbers(x), w))))
        return y * tf.reduce_mean(tf.linalg.matvec(_numbers(x), w) ** 2)

    return _reverse(lambda w: _forward(loss, w), w)


def _of_means(count: int) -> list[tf.Tensor]:
    """The mean over the replicas of what a product of two means gives."""
    x = tf.concat([_numbers(float(r)) for r in range(1, count + 1)], 0)

    def loss(w: Any) -> tf.Tensor:
        y = tf.reduce_mean(tf.tanh(tf.linalg.matvec(x, w)))
        return y * tf.reduce_mean(tf.linalg.matvec(x, w) ** 2)

    return [_reverse(lambda w: _forward(loss, w), tf.Variable(_START))] * count


@program(_of_means, close=1e-4)
def reverse_over_forward_mode_through_communication(repl: Replicator) -> Step:
    w = tf.Variable(_START)
    return lambda x: repl.all_reduce(
        _of_mean(x, lambda y: repl.all_reduce(y, "mean"), w), "mean"
    )
