# SPDX-License-Identifier: Apache-2.0
"""Values get the same key only if they must be equal on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import tensorflow as tf

from replicator._tf import functions
from replicator.graph.same.keys import Keys, Loop
from tests import helpers


def _both(build: Callable[[int], tf.Tensor]) -> bool:
    """Whether the values that two replicas build get the same key."""
    with tf.Graph().as_default():
        keys = Keys()
        values = []
        for replica_id in range(2):
            with tf.device(f"/device:CPU:{replica_id}"):
                values.append(build(replica_id))
        return keys.same(values)


SAME: dict[str, Callable[[int], Any]] = {
    "constants": lambda r: tf.constant([1.0, 2.0]),
    "ops of constants": lambda r: tf.range(3) * 2 + 1,
    "a result of many": lambda r: tf.unstack(tf.constant([1, 2]))[1],
    "stateless numbers": lambda r: tf.random.stateless_uniform([2], [1, 2]),
}
DIFFERENT: dict[str, Callable[[int], Any]] = {
    "constants of other values": lambda r: tf.constant(r),
    "constants of other dtypes": lambda r: tf.constant(1, [tf.int32, tf.int64][r]),
    "other results of one op": lambda r: tf.unstack(tf.constant([1, 1]))[r],
    "other ops": lambda r: [tf.sin, tf.cos][r](tf.constant(0.0)),
    "other attributes": lambda r: tf.reduce_sum(tf.ones([1, 1]), 0, keepdims=r == 0),
    "random numbers": lambda r: tf.random.uniform([]),
    "what is fed": lambda r: tf.compat.v1.placeholder(tf.float32, []),
    "what may be fed": lambda r: helpers.opaque(1.0),
    "python": lambda r: tf.numpy_function(lambda: 1.0, [], tf.float64),
    "other inputs": lambda r: tf.constant(1.0) + [1.0, 2.0][r],
    "conditionals": lambda r: tf.cond(
        tf.constant(True), lambda: tf.constant(1), lambda: tf.constant(2)
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_same(what: str) -> None:
    assert _both(SAME[what])


@pytest.mark.parametrize("what", DIFFERENT)
def test_different(what: str) -> None:
    assert not _both(DIFFERENT[what])


def _of_loops(*make: Callable[[], Any]) -> list[bool]:
    """The variables of the replicas' loops that stay the same."""
    with tf.Graph().as_default() as graph:
        for build in make:
            build()
        loops = [op for op in graph.get_operations() if "While" in op.type]
        keys = Keys()
        columns = zip(*(Loop(keys, op).keys() for op in loops), strict=False)
        return [len(set(column)) == 1 for column in columns]


def _loop(start: int = 0, step: int = 1) -> Callable[[], Any]:
    """A loop over a counter, a replica's own value, and one computed from both."""
    return lambda: tf.while_loop(
        lambda n, x, y: n < 3,
        lambda n, x, y: (n + step, x, y + x * tf.cast(n, tf.float32)),
        [tf.constant(start), tf.random.uniform([]), tf.constant(0.0)],
    )


def _last_three(stay: list[bool]) -> list[bool]:
    """Skips the counters that TensorFlow adds to each loop."""
    return stay[2:]


def test_a_counter_stays_the_same_and_what_meets_other_values_does_not() -> None:
    stay = _of_loops(_loop(), _loop())
    assert _last_three(stay) == [True, False, False]


@pytest.mark.parametrize("other", [_loop(start=1), _loop(step=2)])
def test_counters_of_other_loops_differ(other: Callable[[], Any]) -> None:
    assert _last_three(_of_loops(_loop(), other)) == [False, False, False]


def _exchange(kept: bool) -> Callable[[], Any]:
    """A loop whose variables are equal at first; one becomes a replica's own late."""

    def build() -> Any:
        own = tf.constant(0.0) if kept else tf.random.uniform([])
        return tf.while_loop(
            lambda n, a, b, c: n < 3,
            lambda n, a, b, c: (n + 1, b, c, own),
            [tf.constant(0), *(tf.constant(k) for k in (1.0, 2.0, 3.0))],
        )

    return build


def test_what_comes_from_a_variable_that_differs_later_differs() -> None:
    assert _last_three(_of_loops(_exchange(True), _exchange(True)))[:4] == [True] * 4
    found = _last_three(_of_loops(_exchange(False), _exchange(False)))
    assert found[:4] == [True, False, False, False]


def _nested(step: int = 1) -> Callable[[], Any]:
    """A loop in a loop, over values that are equal and a replica's own."""

    def body(n: Any, x: Any, y: Any) -> Any:
        inner = tf.while_loop(
            lambda k, z: k < n + step, lambda k, z: (k + step, z + x), [0, y]
        )
        return n + 1, x * 2.0, inner[1]

    return lambda: tf.while_loop(
        lambda n, x, y: n < 3,
        body,
        [tf.constant(0), tf.constant(1.0), tf.random.uniform([])],
    )


def test_loops_in_loops() -> None:
    """What an inner loop returns is taken as unknown; the rest is followed."""
    assert _last_three(_of_loops(_nested(), _nested()))[:3] == [True, True, False]


def test_loops_of_other_numbers_of_variables() -> None:
    def small() -> Any:
        return tf.while_loop(lambda n: n < 3, lambda n: (n + 1,), [tf.constant(0)])

    assert _last_three(_of_loops(_loop(), small)) == [True]


def _asserts(step: Callable[[], Any], num_replicas: int = 2, **options: Any) -> int:
    """Returns the number of assertions in the merged ops of a step, to any depth."""
    repl = helpers.make(num_replicas, **options)
    counted = []

    def count(ops: Iterable[tf.Operation]) -> int:
        inside = [body for op in ops for _, body in functions.called_graphs(op)]
        own_asserts = sum(op.type == "Assert" for op in ops)
        return own_asserts + sum(count(body.get_operations()) for body in inside)

    @tf.function(autograph=False)
    def outer() -> Any:
        result = repl.run(lambda: step(repl))
        ops = tf.compat.v1.get_default_graph().get_operations()
        counted.append(count([op for op in ops if "merged_" in op.name]))
        return result

    outer()
    return counted[0]


@pytest.mark.parametrize("build", ["trace", "clone"])
def test_a_loop_over_a_counter_compares_nothing(build: str) -> None:
    def step(repl: Any) -> Any:
        return tf.while_loop(
            lambda n, x: n < 3,
            lambda n, x: (n + 1, repl.all_reduce(x)),
            [tf.constant(0), tf.constant(1.0)],
        )[1]

    assert _asserts(step, build=build) == 0


def test_a_condition_on_what_was_reduced_compares_nothing() -> None:
    def step(repl: Any) -> Any:
        total = repl.all_reduce(tf.random.uniform([]))
        return tf.cond(total < 1.0, lambda: repl.all_reduce(total), lambda: total)

    assert _asserts(step) == 0


@pytest.mark.parametrize("algorithm", ["shuffled", "tree", "ring"])
def test_what_was_reduced_is_the_same_in_all_copies(algorithm: str) -> None:
    def step(repl: Any) -> Any:
        total = repl.all_reduce(tf.random.uniform([4]), algorithm=algorithm)[0]
        return tf.cond(total < 1.0, lambda: repl.all_reduce(total), lambda: total)

    assert _asserts(step) == 0


def test_a_condition_on_a_replicas_own_value_is_compared() -> None:
    def step(repl: Any) -> Any:
        noise = tf.random.uniform([])
        return tf.cond(noise < 2.0, lambda: repl.all_reduce(noise), lambda: noise)

    assert _asserts(step) == 1


def test_what_a_function_returns_twice_is_not_the_same() -> None:
    # Both calls hold the same communication; replica 1 uses the other result.
    repl = helpers.make(2)

    @tf.function
    def total(x: tf.Tensor) -> tf.Tensor:
        return repl.all_reduce(x)

    def step() -> tf.Tensor:
        both = [total(tf.constant(1.0)), total(tf.constant(-1.0))]
        chosen = both[repl.replica_id]
        return tf.cond(chosen > 0, lambda: repl.all_reduce(chosen), lambda: chosen)

    with pytest.raises(tf.errors.InvalidArgumentError, match="disagree"):
        repl.run(step)


def test_the_gradient_of_a_loop_compares_nothing() -> None:
    # The forward loop's turns are compared; the gradient's then agree as well.
    def step(repl: Any) -> tf.Tensor:
        x, turns = tf.random.uniform([]), helpers.opaque(3)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(
                lambda n, x: n < turns,
                lambda n, x: (n + 1, x * repl.all_reduce(x)),
                [tf.constant(0), x],
            )[1]
        return tape.gradient(y, x)

    assert _asserts(step) == 1
