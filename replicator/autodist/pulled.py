# SPDX-License-Identifier: Apache-2.0
"""Finds ops that pull elements from an iterator or a queue that replicas share.

In a session, such elements are dealt to the replicas, wherever they are pulled: by the
graph itself, or by a conditional or a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator import _tf, errors
from replicator.graph.ir import shapes
from replicator.graph.ir.kinds import kind_of

_PULLS = re.compile(r"IteratorGetNext(Sync|AsOptional)?|QueueDequeue\w*|ReaderRead\w*")
_Test = Callable[[tf.Tensor], bool]


def pulls(op: tf.Operation) -> bool:
    """Whether an op, or a function that it calls, pulls elements from outside of it."""
    return _first([op], _is_given) is not None


def _is_given(tensor: tf.Tensor) -> bool:
    """Whether a resource is none that the function around it has made."""
    return not tensor.graph.building_function or _source(tensor).type == "Placeholder"


def order(before: tf.Operation, after: tf.Operation, handles: Sequence[int]) -> None:
    """Makes one op pull its elements when another has.

    Args:
        before: The op that pulls first.
        after: The other.
        handles: The indices of its inputs that are what it pulls from.
    """
    if not kind_of(after).calls:
        _tf.add_control_inputs(after, [before])
        return
    # TensorFlow inlines it, and then what pulls only waits for its own operands.
    waited = tf.identity(before.outputs[0]) if before.outputs else before
    with tf.control_dependencies([waited]):
        for k in handles:
            with tf.device(after.inputs[k].op.device):
                _tf.set_input(after, k, tf.identity(after.inputs[k]))


def examples_of(source: tf.Operation, num_replicas: int) -> int | None:
    """Returns which result of an op that pulls has a row per example, or None.

    Args:
        source: The op.
        num_replicas: The number of replicas; if there are several, they are weighed.

    Raises:
        UnsupportedError: It is a function that returns no element, but what it computes
            of one: there is nothing to count.
    """
    op = _first([source], lambda tensor: True) or source
    sized = any((shapes.static(tensor) or (0,))[0] is None for tensor in op.outputs)
    for is_unknown in (True, False):
        for k, tensor in enumerate(source.outputs):
            shape = shapes.static(tensor)
            if tensor.dtype in (tf.resource, tf.variant) or not shape:
                continue
            if (shape[0] is None) == is_unknown:
                return k
        if sized and op is not source and num_replicas > 1:
            raise errors.UnsupportedError(
                errors.compose(
                    f"{source.name} pulls elements from an iterator or a queue, and "
                    "returns none: how many examples each replica is dealt is unknown.",
                    [f"at {errors.line_of(source)}"],
                    "return the element from the function or the conditional, and "
                    "compute the rest outside of it.",
                )
            )
    return None


def _first(ops: Sequence[tf.Operation], is_outside: _Test) -> tf.Operation | None:
    """Returns the first op that pulls from a resource for which `is_outside` is true.

    Args:
        ops: The ops of a graph, into whose functions to look, too.
        is_outside: Tests a tensor of this graph.
    """
    for op in ops:
        if _PULLS.fullmatch(op.type) and is_outside(op.inputs[0]):
            return op
        for _, body in _tf.called_graphs(op) if kind_of(op).calls else ():
            found = _first(body.get_operations(), _inside(op, body, is_outside))
            if found is not None:
                return found
    return None


def _inside(op: tf.Operation, body: tf.Graph, is_outside: _Test) -> _Test:
    """Returns the test for the tensors of a function that an op calls."""
    # The first inputs of a conditional say which function to call.
    given = op.inputs[len(op.inputs) - len(body.inputs) :]
    sources = dict(zip((t.op for t in body.inputs), given, strict=False))

    def test(tensor: tf.Tensor) -> bool:
        source = _source(tensor)
        return source in sources and is_outside(sources[source])

    return test


def _source(tensor: tf.Tensor) -> tf.Operation:
    op = tensor.op
    while op.type == "Identity":
        op = op.inputs[0].op
    return op
