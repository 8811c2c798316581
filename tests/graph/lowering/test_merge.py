# SPDX-License-Identifier: Apache-2.0
"""The structure of merged ops; tests/programs compares their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator._tf import effects, ops
from tests import helpers

BUILDS = ["function", "session"]


def _built(kind: str, num_replicas: int, step: Callable[[Any], Any]) -> tf.Graph:
    """Returns the graph of a step of one argument, the Replicator."""
    repl = helpers.make(num_replicas)
    return helpers.built(repl, lambda: step(repl), kind)[0]


def _ops(graph: tf.Graph, *types: str) -> list[tf.Operation]:
    return [
        op
        for op in graph.get_operations()
        if op.type in types and not ops.is_abandoned(op)
    ]


def _is_merged(op: tf.Operation) -> bool:
    """Whether it combines several replicas' ops, and is no comparison before it."""
    return op.name.startswith("merged_") and "/cond" not in op.name


def _loop(repl: Any) -> tf.Tensor:
    return tf.while_loop(
        lambda n, x: n < 3,
        lambda n, x: (n + 1, repl.all_reduce(x)),
        [tf.constant(0), helpers.opaque(1.0)],
    )[1]


def _conditional(repl: Any) -> tf.Tensor:
    x = helpers.opaque(1.0)
    return tf.cond(x > 0.0, lambda: repl.all_reduce(x), lambda: x)


def _switch(repl: Any) -> tf.Tensor:
    x = helpers.opaque(1.0)
    return tf.switch_case(helpers.opaque(1), [lambda: x, lambda: repl.all_reduce(x)])


@pytest.mark.parametrize("kind", BUILDS)
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize(
    ("step", "types"),
    [
        (_loop, ("While", "StatelessWhile")),
        (_conditional, ("If", "StatelessIf")),
        (_switch, ("Case", "StatelessCase")),
    ],
    ids=["loop", "conditional", "switch"],
)
def test_one_op_takes_the_inputs_of_all_and_has_their_results(
    step: Callable[[Any], Any], types: tuple[str, ...], num_replicas: int, kind: str
) -> None:
    graph = _built(kind, num_replicas, step)
    merged = [op for op in _ops(graph, *types) if _is_merged(op)]
    assert len(merged) == 1
    old = [
        op
        for op in graph.get_operations()
        if op.type in types and op.name.startswith("replica_")
    ]
    assert len(old) == num_replicas
    assert len(merged[0].outputs) == sum(len(op.outputs) for op in old)
    assert not any(t.consumers() for op in old for t in op.outputs)
    assert merged[0].get_attr("_lower_using_switch_merge")


@pytest.mark.parametrize(
    ("kind", "types"),
    [("function", ("PartitionedCall",)), ("session", ("StatelessCase",))],
)
def test_a_function_is_called_as_its_graph_takes_it_apart(
    kind: str, types: tuple[str, ...]
) -> None:
    def step(repl: Any) -> tf.Tensor:
        return tf.function(repl.all_reduce)(helpers.opaque(1.0))

    graph = _built(kind, 2, step)
    assert [op.name.split("/")[0] for op in _ops(graph, *types)] == ["merged_function"]


@pytest.mark.parametrize("kind", BUILDS)
def test_it_waits_and_is_waited_for_as_each_of_them_was(kind: str) -> None:
    gates: list[tf.Operation] = []
    after: list[tf.Operation] = []

    def step(repl: Any) -> tf.Tensor:
        x = helpers.opaque(1.0)
        positive = x > 0.0
        gates.append(tf.no_op(name="gate"))
        with tf.control_dependencies([gates[-1]]):
            y = tf.cond(positive, lambda: repl.all_reduce(x), lambda: x)
        taken = y
        while "If" not in taken.op.type:
            taken = taken.op.inputs[0]
        with tf.control_dependencies([taken.op]):
            after.append(tf.no_op(name="after"))
        return y

    graph = _built(kind, 2, step)
    (merged,) = filter(_is_merged, _ops(graph, "StatelessIf"))
    assert set(gates) <= set(merged.control_inputs)
    for op in after:
        assert op.control_inputs == [merged]


@pytest.mark.parametrize("reads_only", [True, False])
def test_it_says_which_resources_nobody_writes(reads_only: bool) -> None:
    variables = []

    def step(repl: Any) -> tf.Tensor:
        if not variables:
            variables.append(tf.Variable(1.0))
        (variable,) = variables

        def turn(n: tf.Tensor) -> tuple[tf.Tensor]:
            total = repl.all_reduce(variable.read_value())
            if not reads_only:
                variable.assign(total)
            return (n + 1 + tf.cast(0.0 * total, tf.int32),)

        return tf.while_loop(lambda n: n < 2, turn, [helpers.opaque(0)])[0]

    graph = _built("function", 2, step)
    (merged,) = _ops(graph, "While", "StatelessWhile")
    handles = {id(t) for t in merged.inputs if t.dtype == tf.resource}
    assert len(handles) == 2
    none: set[int] = set()
    reads, writes = (handles, none) if reads_only else (none, handles)
    assert effects.resources_touched(merged) == (reads, writes)
