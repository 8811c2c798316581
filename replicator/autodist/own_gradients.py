# SPDX-License-Identifier: Apache-2.0
"""Checks whether custom gradients on parts of the batch add up to that of one device.

`tf.custom_gradient` and `gradient_override_map` let a gradient be anything: divided by
its norm, say, or by a mean of the batch, which differs between replicas. The kind of
the loss does not reveal that. So such a gradient is traced once more on placeholders,
and the rules for values say what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import tensorflow as tf

from replicator import _tf, context
from replicator.autodist import flows, powers, wholes
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value
from replicator.graph.ir.kinds import kind_of

_HANDLES = (tf.resource, tf.variant)
OfBody = Callable[[tf.Graph, Sequence[Value], Sequence[tf.Tensor]], list[Value]]


def between(results: Sequence[tf.Tensor]) -> Iterator[tf.Operation]:
    """Yields the ops behind results that have custom gradients or call functions."""
    for op in flows.upstream(results, lambda op: op.type in wholes.STOPS):
        if _tf.own_gradient(op) is not None or kind_of(op).calls:
            yield op


def first_not_kept(
    results: Sequence[tf.Tensor],
    differing: Set[tf.Operation],
    of: Callable[[tf.Tensor], Value],
    find: OfBody,
    of_body: OfBody,
) -> tf.Operation | None:
    """Returns an op whose custom gradient may not be that of one device, or None.

    Args:
        results: The tensors that are differentiated.
        differing: The ops that differ between replicas: `of` has already checked the
            functions that they call.
        of: Returns the Value of a tensor.
        find: Returns the Values of a function's results, given those of its arguments.
        of_body: The same for results that are differentiated: unknown if the function
            holds such an op.
    """
    for op in between(results):
        if _tf.own_gradient(op) is not None:
            if not is_kept(op, of, find):
                return op
        elif op not in differing:
            for _, body in _tf.called_graphs(op):
                if UNKNOWN in of_body(body, [SAME] * len(body.inputs), body.outputs):
                    return op
    return None


def is_kept(op: tf.Operation, of: Callable[[tf.Tensor], Value], find: OfBody) -> bool:
    """Whether an op's custom gradient adds up, or has rows, as it does on one device.

    Args:
        op: The op with the custom gradient.
        of: Returns the Value of a tensor of its graph.
        find: Returns the Values of a function's results, given those of its arguments.
    """
    body = _traced(op)
    if body is None:
        return False
    expected = [dual(of(tensor)) for tensor in op.inputs]
    argument_values = [dual(of(tensor)) for tensor in op.outputs]
    for outer, _ in body.graph.captures:
        is_known = tf.is_symbolic_tensor(outer) and outer.dtype not in _HANDLES
        argument_values.append(
            SAME if not is_known else of(outer) if outer.graph is op.graph else UNKNOWN
        )
    gradients = tf.nest.flatten(body.structured_outputs)
    if len(gradients) != len(expected):
        return False
    tensors = [gradient for gradient in gradients if gradient is not None]
    gradient_values = dict(
        zip(map(id, tensors), find(body.graph, argument_values, tensors), strict=True)
    )
    return all(
        gradient is None
        or powers.is_zero(gradient)
        or _is(gradient_values[id(gradient)], expected_value)
        for gradient, expected_value in zip(gradients, expected, strict=True)
    )


def dual(value: Value) -> Value:
    """Returns the Value of a weighted loss's gradient by a tensor of a given Value.

    By rows, the gradient has rows. By a tensor that is the same on all replicas, the
    replicas' gradients add up; by a mean, they are equal up to a power of each
    replica's number of examples.
    """
    if value.kind is Kind.ROWS:
        rows = Value(Kind.ROWS, -value.power, value.axis, value.order)
        return rows.replaced(each=value.each, some=value.some)
    if value.kind in (Kind.SAME, Kind.MEAN):
        dual_kind = Kind.MEAN if value.kind is Kind.SAME else Kind.SAME
        return Value(dual_kind, 1 - value.power)
    return value if value.kind is Kind.DRAWN else UNKNOWN


def _is(found: Value, wanted: Value) -> bool:
    if wanted.kind is Kind.DRAWN:
        return True  # nothing is trained through it
    if found.kind is Kind.UNKNOWN:
        return False
    adds_up = found.kind is Kind.SAME and wanted.kind is Kind.MEAN
    kind = wanted.kind if adds_up else found.kind
    return found.replaced(kind=kind, by_value=True) == wanted


def _traced(op: tf.Operation) -> Any:
    """Returns the trace of an op's custom gradient, or None if it cannot be traced.

    Synchronization is off meanwhile, so gradients of variables read in it are not taken
    for those of the step.
    """
    gradient, replica = _tf.own_gradient(op), context.current()
    if gradient is None or _tf.trains_variables(gradient):
        return None
    before = None if replica is None else replica.synchronizes
    if replica is not None:
        replica.synchronizes = None
    try:
        with op.graph.as_default():
            traceable = tf.function(
                lambda *given: gradient(op, *given), autograph=False
            )
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in op.outputs]
            return traceable.get_concrete_function(*specs)
    except Exception:  # from the user's function, which is called once more here
        return None
    finally:
        if replica is not None:
            replica.synchronizes = before
