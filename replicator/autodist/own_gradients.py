# SPDX-License-Identifier: Apache-2.0
"""Gradients of the user's own: whether on a part of the batch they are what they were.

`tf.custom_gradient` and `gradient_override_map` have a gradient be whatever the user
says: divided by its norm, say, or by a mean of the batch, which on each replica is
another one. What a loss is does not tell. So such a gradient is traced once more, of
placeholders, and what is known of values says what it makes of them.
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
    """Yields what results are made of that has such a gradient, or calls functions."""
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
    """Returns what has such a gradient, not that of one device; None if nothing has.

    Args:
        results: What is differentiated.
        differing: What differs between replicas: where that calls functions, `of` has
            looked into these.
        of: Returns what is known of a tensor.
        find: Returns what is known of a function's results, given its arguments.
        of_body: The same, of what is differentiated: unknown where this is not None.
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
    """Whether an op's gradient of its own adds up, or has rows, as on one device.

    Args:
        op: Has such a gradient.
        of: Returns what is known of a tensor of its graph.
        find: Returns what is known of a function's results, given its arguments.
    """
    body = _traced(op)
    if body is None:
        return False
    wanted = [dual(of(tensor)) for tensor in op.inputs]
    given = [dual(of(tensor)) for tensor in op.outputs]
    for outer, _ in body.graph.captures:
        known = tf.is_symbolic_tensor(outer) and outer.dtype not in _HANDLES
        given.append(
            SAME if not known else of(outer) if outer.graph is op.graph else UNKNOWN
        )
    made = tf.nest.flatten(body.structured_outputs)
    if len(made) != len(wanted):
        return False
    tensors = [one for one in made if one is not None]
    found = dict(zip(map(id, tensors), find(body.graph, given, tensors), strict=True))
    return all(
        one is None or powers.is_zero(one) or _is(found[id(one)], want)
        for one, want in zip(made, wanted, strict=True)
    )


def dual(value: Value) -> Value:
    """Returns what the gradient of a loss by a value is, once the loss is weighed.

    That by rows has rows. That by what is the same on all replicas adds up to it, and
    that by a part of a mean is the same, but for how many examples a replica has.
    """
    if value.kind is Kind.ROWS:
        return Value(
            *(Kind.ROWS, -value.power, value.axis, value.order), some=value.some
        )
    if value.kind in (Kind.SAME, Kind.MEAN):
        swapped = Kind.MEAN if value.kind is Kind.SAME else Kind.SAME
        return Value(swapped, 1 - value.power)
    return value if value.kind is Kind.DRAWN else UNKNOWN


def _is(found: Value, wanted: Value) -> bool:
    if wanted.kind is Kind.DRAWN:
        return True  # nothing is trained by it
    if found.kind is Kind.UNKNOWN:
        return False
    added = found.kind is Kind.SAME and wanted.kind is Kind.MEAN
    kind = wanted.kind if added else found.kind
    return found.replaced(kind=kind, by_value=True) == wanted


def _traced(op: tf.Operation) -> Any:
    """Returns a function of the gradients of what an op makes; None if there is none.

    What is read of variables in it is not to be taken for a gradient of the step.
    """
    gradient, replica = _tf.own_gradient(op), context.current()
    if gradient is None or _tf.trains_variables(gradient):
        return None
    before = None if replica is None else replica.synchronizes
    if replica is not None:
        replica.synchronizes = None
    try:
        with op.graph.as_default():
            own = tf.function(lambda *given: gradient(op, *given), autograph=False)
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in op.outputs]
            return own.get_concrete_function(*specs)
    except Exception:  # whatever a user's function raises, where it is called again
        return None
    finally:
        if replica is not None:
            replica.synchronizes = before
