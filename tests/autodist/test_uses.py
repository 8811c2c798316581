# SPDX-License-Identifier: Apache-2.0
"""The ops that use variables: which accept parts, and which need a whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.autodist import marked, uses
from replicator.autodist.program import Program

v1 = tf.compat.v1
OPTIMIZERS = {
    "Adam": v1.train.AdamOptimizer,
    "Momentum": lambda rate: v1.train.MomentumOptimizer(rate, 0.9),
}


def _program(build: Callable[[Any], Any]) -> tuple[Program, Any]:
    """Returns the graph of a function of a variable w, and the function's result."""
    variables: list[Any] = []
    with tf.Graph().as_default() as graph:
        with tf.variable_creator_scope(marked.creator(variables)):
            built = build(tf.Variable(tf.ones([4, 2]), name="w"))
        return Program(graph, variables), built


TAKES: dict[str, Callable[[Any], Any]] = {
    "reads": lambda w: (w + 1, tf.gather(w, [0]), tf.shape(w), w[1]),
    "writes": lambda w: (w.assign(w), w.scatter_add(tf.IndexedSlices(1.0, [1]))),
    "a branch": lambda w: tf.cond(tf.constant(True), lambda: w + 1, lambda: w * 2),
    "a loop": lambda w: tf.while_loop(
        lambda t: True, lambda t: [t + tf.reduce_sum(w)], [0.0]
    ),
    "a function": lambda w: tf.function(lambda: tf.function(lambda: w * 2)())(),
}
REFUSES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a dataset": (
        lambda w: tf.data.Dataset.range(2).map(lambda k: w[k])._variant_tensor,
        "MapDataset",
    ),
    "compiled": (lambda w: tf.function(lambda: w * 2, jit_compile=True)(), "Call"),
    "compiled, deep inside": (
        lambda w: tf.cond(
            tf.constant(True),
            lambda: tf.function(lambda: w * 2, jit_compile=True)(),
            lambda: w * 1,
        ),
        "If",
    ),
    "an op of whole ones": (
        lambda w: tf.raw_ops.DestroyResourceOp(resource=w.handle),
        "DestroyResourceOp",
    ),
}


@pytest.mark.parametrize("name", TAKES)
def test_these_take_parts(name: str) -> None:
    program, _ = _program(TAKES[name])
    assert uses.obstacle(program, ["w"]) is None
    assert not uses.needing_components(program)


@pytest.mark.parametrize("name", REFUSES)
def test_these_do_not(name: str) -> None:
    build, kind = REFUSES[name]
    program, _ = _program(build)
    actual = uses.obstacle(program, ["w"])
    assert actual is not None and kind in actual.type
    needing = uses.needing_components(program)
    assert list(needing) == ([] if kind == "DestroyResourceOp" else ["w"])
    if name.startswith("compiled"):
        assert "jit_compile=True" in needing["w"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_take_parts_of_all_their_variables_or_of_none(name: str) -> None:
    program, _ = _program(lambda w: OPTIMIZERS[name](0.1).minimize(tf.nn.l2_loss(w)))
    slots = [one for one in program.variables if one.startswith("w/")]
    assert slots
    assert uses.obstacle(program, ["w", *slots]) is None
    actual = uses.obstacle(program, ["w", *slots[1:]])
    assert actual is not None and actual.type.startswith("ResourceApply")


def test_handles_are_told_through_what_passes_them_on() -> None:
    def build(w: Any) -> Any:
        handle = tf.identity(tf.identity(w.handle))
        turns = tf.raw_ops.While(
            input=[tf.constant(0), handle],
            cond=_traced(lambda k, h: k < 2),
            body=_traced(lambda k, h: (k + 1, h)),
        )
        return handle, turns

    program, (handle, turns) = _program(build)
    own = program.variables["w"].handle
    assert uses.passed_on(handle) is own and uses.passed_on(turns[1]) is own
    assert uses.passed_on(turns[0]) is turns[0]
    names = [attribute for attribute, _ in uses.called(turns[0].op)]
    assert names == ["body", "cond"] and not uses.called(handle.op)
    assert uses.arguments(turns[0].op) == list(turns[0].op.inputs)


def _traced(function: Callable[..., Any]) -> Any:
    specs = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource)
    traced = tf.function(function).get_concrete_function(*specs)
    traced.add_to_graph(v1.get_default_graph())
    return traced
