# SPDX-License-Identifier: Apache-2.0
"""Tells which ops have side effects, and adjusts how TensorFlow orders them.

Makes no decisions: graph/order/ordering.py orders the effects of a step.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, MutableSet
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps as _acd
from tensorflow.python.framework import auto_control_deps_utils as _acd_utils


def is_stateful(op: tf.Operation) -> bool:
    """Whether TensorFlow's automatic control dependencies would make `op` run."""
    return bool(_acd.op_is_stateful(op))


def only_reads(op: tf.Operation) -> bool:
    """Whether `op` only reads the variables that it takes."""
    return op.type in _acd_utils.RESOURCE_READ_OPS


def resources_touched(op: tf.Operation) -> tuple[set[int], set[int]]:
    """Returns the ids of the resource tensors that `op` reads and those it writes."""
    reads, writes = _acd_utils.get_read_write_resource_inputs(op)
    return {id(t) for t in reads}, {id(t) for t in writes}


def run_independently(graph: tf.Graph, op: tf.Operation) -> None:
    """Exempts `op` from the automatic ordering of the function being traced.

    TensorFlow chains all stateful ops that touch no resource in the order of creation,
    across replicas too. `experimental_acd_manager` is its hook to prevent that.
    """
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(op)


@contextlib.contextmanager
def ordered_branches(graph: tf.Graph) -> Iterator[None]:
    """Keeps the effects of conditionals and loops that the block adds to a tf.Graph.

    Their bodies run ops that nothing fetches only if the enclosing graph orders
    effects, as a tf.function's does. There is no public way to ask for it in a
    tf.Graph.
    """
    saved = graph._add_control_dependencies
    graph._add_control_dependencies = True
    try:
        yield
    finally:
        graph._add_control_dependencies = saved


@functools.cache
def order_captured_twice() -> None:
    """Has functions order all uses of a resource that they captured in several ways.

    A function that captures both a variable's handle and an identity of it has an
    argument for each. Automatic control dependencies order the uses of each argument
    separately, and look through identities only inside a function, so that reads
    through one argument could run before or after writes through the other. Resolvers,
    their extension point, are not public; they are asked in the whole process, so none
    is added before a step is built.
    """
    _acd.register_acd_resource_resolver(_resolve_captures)


def _resolve_captures(
    op: tf.Operation, reads: MutableSet[tf.Tensor], writes: MutableSet[tf.Tensor]
) -> bool:
    """Replaces resources by the first argument through which a function captured them.

    Args:
        op: An op of the function.
        reads: The resources that it reads; updated in place.
        writes: The resources that it may write; updated in place.

    Returns:
        Whether anything was replaced.
    """
    graph: Any = op.graph
    first = _first_captures(graph)
    is_replaced = False
    for resources in (reads, writes) if first else ():
        for tensor in [t for t in resources if id(t) in first]:
            resources.discard(tensor)
            resources.add(graph.inputs[first[id(tensor)]])
            is_replaced = True
    return is_replaced


# For each function's graph: the number of its arguments, and `_find_first_captures` of
# these. They are ids and indices, as tensors would keep the graph alive.
_FIRST_CAPTURES: weakref.WeakKeyDictionary[Any, tuple[int, dict[int, int]]] = (
    weakref.WeakKeyDictionary()
)


def _first_captures(graph: Any) -> dict[int, int]:
    """Maps the ids of later arguments for a resource to the index of its first one.

    Args:
        graph: Any graph; only a function's has arguments.
    """
    inputs = getattr(graph, "inputs", ())
    if graph not in _FIRST_CAPTURES or _FIRST_CAPTURES[graph][0] != len(inputs):
        _FIRST_CAPTURES[graph] = (
            len(inputs),
            _find_first_captures(graph) if inputs else {},
        )
    return _FIRST_CAPTURES[graph][1]


def _find_first_captures(graph: Any) -> dict[int, int]:
    outer = {id(inner): outer for outer, inner in graph.captures}
    index_by_origin: dict[int, int] = {}
    first: dict[int, int] = {}
    for index, inner in enumerate(graph.inputs):
        if inner.dtype == tf.resource and id(inner) in outer:
            first_index = index_by_origin.setdefault(
                id(_origin(outer[id(inner)])), index
            )
            if first_index != index:
                first[id(inner)] = first_index
    return first


def _origin(resource: tf.Tensor) -> tf.Tensor:
    """Returns the resource behind identities and the captures of functions."""
    while tf.is_symbolic_tensor(resource):
        graph: Any = resource.graph
        outer = None
        if resource.op.type == "Identity":
            outer = resource.op.inputs[0]
        elif resource.op.type == "Placeholder":
            captures = getattr(graph, "captures", ())
            outer = next((t for t, inner in captures if inner is resource), None)
        if outer is None:
            break
        resource = outer
    return resource
