# SPDX-License-Identifier: Apache-2.0
"""Reads, writes and effects: each replica sees them in the order of its program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator import Replicator
from tests import helpers
from tests.programs.program import Step, program

_ONES = [1.0, 1.0]


def _read(handle: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)


def _equal(taken: bool) -> tf.Tensor:
    """A condition that is known to be equal on all replicas, but not before it runs."""
    return tf.random.stateless_uniform([], [1, 2]) < (2.0 if taken else -1.0)


# --- A variable of each replica's own -------------------------------------------------


def _in_a_branch(variable: Any) -> None:
    def double() -> tf.Tensor:
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=variable * 2.0)
        return tf.constant(0)

    tf.cond(helpers.opaque(True), double, lambda: tf.constant(1))


_DOUBLING: list[Callable[[Any], Any]] = [
    lambda variable: variable.assign(variable * 2.0),
    lambda variable: variable.assign_add(variable),
    lambda variable: tf.function(lambda: variable.assign(variable * 2.0))(),
    _in_a_branch,
]


@program(lambda count: [[[2.0**n] * 2 for n in range(8, 17)]] * count, steps=2)
def doubled_in_all_ways(repl: Replicator) -> Step:
    variable = tf.Variable(
        1.0,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )

    def step() -> tf.Tensor:
        seen = [[variable + 0.0, variable * 1.0]]
        for double in 2 * _DOUBLING:
            double(variable)
            seen.append([variable + 0.0, variable * 1.0])
        return tf.stack(seen)

    return step


# --- Variables of all -----------------------------------------------------------------


@program(
    lambda count: [
        [seen] * count for seen in ([1.0] * 2, [3.0] * 2, [4.0] * 2, [8.0] * 2, [1.0])
    ]
)
def written_in_other_shapes(repl: Replicator) -> Step:
    variable = tf.Variable(_ONES, shape=[None])

    def step() -> list[tf.Tensor]:
        seen = [variable.read_value()]
        variable.assign(variable * 3.0)
        seen.append(variable + 0.0)
        variable.assign_add(_ONES)
        seen.append(variable + 0.0)
        tf.function(lambda: variable.assign(variable * 2.0))()
        seen.append(variable + 0.0)
        variable.assign([1.0])
        return [*seen, variable + 0.0]

    return step


def _of_two(count: int) -> list[Any]:
    mean, first, second = (count + 1) / 2, 1.0, 2.0
    for _ in range(2):
        seen = [first, second]
        first += mean
        seen += [first, second]
        first, second = 2 * first, 10 * mean
        seen += [first, second]
    return [[[x], [[x]]][n % 2 : n % 2 + 1] * count for n, x in enumerate(seen)]


@program(_of_two, steps=2)
def two_variables_in_turn(repl: Replicator) -> Step:
    first, second = tf.Variable([1.0]), tf.Variable([[2.0]])

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        seen = [first.read_value(), second.read_value()]
        first.assign_add([x])
        seen += [first.read_value(), second.read_value()]
        second.assign([[10.0 * x]])
        first.assign(first * 2.0)
        return [*seen, first.read_value(), second.read_value()]

    return step


@program(
    lambda count: [
        [seen] * count for seen in ([0.0, 0.0], [19.0, 20.0], [7.0, 8.0], [[12.0]])
    ]
)
def two_variables_in_a_branch(repl: Replicator) -> Step:
    one, two = tf.Variable(_ONES), tf.Variable([[5.0]])

    def branch() -> tf.Tensor:
        one.assign_add(two[0] + [1.0, 2.0])
        two.assign_add([[one[0]]])
        return one + two[0]

    def step() -> list[tf.Tensor]:
        seen = [
            tf.cond(_equal(taken), branch, lambda: tf.zeros([2]))
            for taken in (False, True)
        ]
        return [*seen, one.read_value(), two.read_value()]

    return step


def _of_a_loop(count: int) -> list[Any]:
    one, two, total = 1.0, 1.0, 0.0
    for _ in range(4):
        one, two = one + two, two + 1
        total += one * two
    return [[total] * count, [[one]] * count, [[[two]]] * count]


@program(_of_a_loop)
def two_variables_in_a_function_in_a_loop(repl: Replicator) -> Step:
    one, two = tf.Variable([1.0]), tf.Variable([[1.0]])

    @tf.function
    def update() -> None:
        one.assign(one + two[0])

    def body(k: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        update()
        two.assign_add([[1.0]])
        return k + 1, total + one[0] * two[0, 0]

    def step() -> list[tf.Tensor]:
        _, total = tf.while_loop(lambda k, _: k < 4, body, (0, 0.0))
        return [total, one.read_value(), two.read_value()]

    return step


def _momentum(place: str, repl: Replicator) -> Step:
    """No replica can run one op that writes variables of two owners for all."""
    facts = {"synchronization": tf.VariableSynchronization.ON_READ}
    one = tf.Variable([[1.0]])
    two = tf.Variable([[2.0]], **(facts if place == "each_replica" else {}))

    def step() -> list[tf.Tensor]:
        with replicator.context.require("test").equal_updates():
            written = tf.raw_ops.ResourceApplyMomentum(
                var=one.handle,
                accum=two.handle,
                lr=1.0,
                grad=tf.ones([1, 1]),
                momentum=0.5,
            )
        with tf.control_dependencies([written]):
            return [tf.identity(one), tf.identity(two)]

    return step


for _name in ("another_owner", "each_replica"):
    program(
        lambda count: [[[[x]]] * count for x in (-5.0, 2.0)],
        steps=3,
        name=f"one_op_writes_what_belongs_to_{_name}",
    )(functools.partial(_momentum, _name))


def _rows(count: int) -> list[Any]:
    table = np.arange(8.0).reshape(4, 2)
    for _ in range(2):
        seen = [table[[1]], table[[3]]]
        table[1] -= 1
        seen.append(table[[1]])
        table = 2 * table
        seen.append(table[[1]])
    return [[rows] * count for rows in seen]


@program(_rows, steps=2)
def rows_of_a_table(repl: Replicator) -> Step:
    """Gathered from the whole variable, as layers of Keras do."""
    table = tf.Variable(tf.reshape(tf.range(8.0), [4, 2]))

    def lookup(row: int) -> tf.Tensor:
        return tf.gather(tf.convert_to_tensor(table), [row])

    def step() -> list[tf.Tensor]:
        seen = [lookup(1), lookup(3)]
        table.scatter_sub(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1])))
        seen.append(lookup(1))
        table.assign(2.0 * table)
        return [*seen, lookup(1)]

    return step


# --- Identities of handles ------------------------------------------------------------


def _read_through_one(variable: Any) -> Any:
    handle = tf.identity(variable.handle)
    before = _read(handle)
    variable.assign_add(_ONES)
    return before, _read(handle), _read(tf.identity(handle))


def _written_through_two(variable: Any) -> Any:
    before = variable.read_value()
    handle = tf.identity(tf.identity(variable.handle))
    tf.raw_ops.AssignAddVariableOp(resource=handle, value=_ONES)
    return before, variable.read_value(), _read(handle)


def _made_once_the_write_is_done(variable: Any) -> Any:
    before = variable.read_value()
    with tf.control_dependencies([variable.assign_add(_ONES)]):
        handle = tf.identity(variable.handle)
    return before, _read(handle), variable.read_value()


def _with_identities(use: Callable[[Any], Any], repl: Replicator) -> Step:
    variable = tf.Variable([1.0, 2.0])
    return lambda: use(variable)


for _use in (_read_through_one, _written_through_two, _made_once_the_write_is_done):
    program(
        lambda count: tuple([[x, x + 1.0]] * count for x in (1.0, 2.0, 2.0)),
        name=f"identities{_use.__name__}",
    )(functools.partial(_with_identities, _use))


# --- Gradients of loops that read -----------------------------------------------------


def _repeated(add: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    return tf.while_loop(
        lambda t, total: t < 2,
        lambda t, total: (t + 1, total + add(t)),
        [0, tf.constant(0.0)],
    )[1]


_LOSSES: dict[str, Callable[[Any], tf.Tensor]] = {
    "rows": lambda v: _repeated(lambda t: v[t] ** 2),
    "the_whole": lambda v: _repeated(lambda t: tf.reduce_sum(v**2)),
    "mapped_rows": lambda v: tf.map_fn(
        lambda t: tf.gather(v, t) ** 3,
        tf.constant([0, 1]),
        fn_output_signature=tf.float32,
    ),
}


def _derivatives(loss: Callable[[Any], tf.Tensor], variable: Any) -> Any:
    """The first and second gradients, by tf.gradients: it asks loops for shapes."""
    first = tf.convert_to_tensor(tf.gradients(loss(variable), [variable])[0])
    second = tf.gradients(tf.reduce_sum(first**2), [variable])[0]
    return first, tf.convert_to_tensor(second)


def _plain_derivatives(loss: Callable[[Any], tf.Tensor], count: int) -> Any:
    with tf.Graph().as_default(), helpers.session() as session:
        variable = tf.Variable([1.0, 2.0])
        fetches = _derivatives(loss, variable)
        session.run(tf.compat.v1.global_variables_initializer())
        return tuple([value] * count for value in session.run(fetches))


def _loop_over_a_variable(loss: Callable[[Any], tf.Tensor], repl: Replicator) -> Step:
    variable = tf.Variable([1.0, 2.0])
    return lambda: _derivatives(loss, variable)


for _name, _loss in _LOSSES.items():
    program(
        functools.partial(_plain_derivatives, _loss),
        name=f"derivatives_of_a_loop_over_{_name}",
    )(functools.partial(_loop_over_a_variable, _loss))


# --- Effects --------------------------------------------------------------------------


def _print() -> tf.Operation:
    return tf.print("", end="", output_stream="file:///dev/null")


_EFFECTS: list[Callable[[tf.Tensor], Any]] = [
    lambda x: _print(),
    lambda x: tf.debugging.check_numerics(x, "NaN"),
    lambda x: tf.debugging.assert_less(x, 1e9),
    lambda x: tf.debugging.Assert(x < 1e9, [x]),
    lambda x: tf.py_function(lambda _: None, [x], []),
    lambda x: tf.numpy_function(np.sin, [x], tf.float32),
    lambda x: tf.random.uniform([]),
    lambda x: tf.cond(x > 0, _print, tf.no_op),
]


@program(lambda count: [float(count) ** 3] * count, steps=2)
def effects_between_collectives(repl: Replicator) -> Step:
    def step() -> tf.Tensor:
        x = tf.constant(1.0)
        for _ in range(3):
            for effect in _EFFECTS:
                effect(x)
            x = repl.all_reduce(x)
            for effect in _EFFECTS:
                effect(x)
        return x

    return step


@program(lambda count: [float(count + count**2 + count**3)] * count, steps=3)
def a_table_that_all_replicas_write(repl: Replicator) -> Step:
    """One resource, read before a collective and written after it, by every replica."""
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def step(x: tf.Tensor) -> tf.Tensor:
        key = tf.cast(x, tf.int64)
        total = repl.all_reduce(tf.reshape(table.lookup(key), []) + 1.0)
        table.insert(key, total)
        return total

    return step


@program(lambda count: [count**4 * (count + 1) / 2] * count)
def what_waits_for_arguments(repl: Replicator) -> Step:
    @tf.function
    def doubled(x: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([x]):
            two = tf.constant(2.0)
        with tf.control_dependencies([x]):
            return repl.all_reduce(two)

    def turn(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([x, n]):
            half = tf.constant(0.5)
        return n + 1, half * doubled(x) * repl.all_reduce(x)

    return lambda x: tf.while_loop(lambda n, x: n < 2, turn, [tf.constant(0), x])[1]
