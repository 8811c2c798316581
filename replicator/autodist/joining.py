# SPDX-License-Identifier: Apache-2.0
"""Computes of the whole batch what does not follow from its values on parts of it.

The root of a mean is not the mean of roots: so means, sums, extrema and rows are put
together first, and what is computed of them is computed once more of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator import _tf
from replicator.autodist import flows, kinds, stamping
from replicator.autodist.kinds import Kind, Value
from replicator.autodist.values import Values
from replicator.graph.ir import shapes, switching
from replicator.graph.ir.kinds import (
    SWITCHES,
    SWITCHING,
    has_effect,
    kind_of,
    resource_inputs,
)
from replicator.primitives import all_reduce

_HEAVY = ("MatMul", "BatchMatMul", "Einsum", "Conv", "Depthwise", "FusedBatchNorm")
_MOST = 2000  # ops that are computed once more


@dataclasses.dataclass(frozen=True)
class Cut:
    """What a value is computed of that can be put together, and by which ops.

    Attributes:
        leaves: The values that are put together, with what they are.
        ops: The ops between them and the value.
        inputs: Those of each, before passes give it others that are equal.
    """

    leaves: list[tuple[tf.Tensor, Value]]
    ops: list[tf.Operation]
    inputs: dict[tf.Operation, list[tf.Tensor]]


def cut(
    known: Values, tensor: tf.Tensor, rows: bool = True, put: bool = False
) -> Cut | None:
    """Returns of what a value is computed that can be put together.

    Args:
        known: Finds what values are.
        tensor: The value.
        rows: Whether rows can be put together, too.
        put: Whether what has to be of the whole batch is, where values are looked up.

    Returns:
        None if something between them draws random numbers, has an effect, is asked of
        Python, or is in a loop of TensorFlow 1.
    """
    control = known.control
    leaves: dict[object, tuple[tf.Tensor, Value]] = {}
    inside: set[tf.Operation] = set()
    stack = [tensor.op]
    while stack:
        op = stack.pop()
        if op in inside:
            continue
        if not _is_pure(op, control) or len(inside) > _MOST:
            return None
        inside.add(op)
        for one in op.inputs:
            value = known.of(one)
            if put:
                value = value.replaced(wholes=frozenset())
            empty = one.dtype == tf.variant and not resource_inputs(one.op)
            # A replica may not have computed what is on one side of a conditional.
            sided = one.op in control or one.op.type in SWITCHES
            if joins(value, rows) and not empty and not sided:
                leaves[one.ref()] = one, value
            elif known.is_given(one):
                return None
            else:
                stack.append(one.op)
        stack += _sides(op, control)
    found = [(t, v) for t, v in leaves.values() if t.op not in inside]
    for one, value in found:
        # Where the size of a batch is known, it may be written in what is computed.
        sized = value.kind is Kind.ROWS and one.shape.rank
        if one.dtype in (tf.resource, tf.variant) or (
            sized and shapes.sizes(one)[value.axis] is not None
        ):
            return None
    ordered = flows.upstream(
        [tensor],
        lambda op: op not in inside,
        lambda op: [*op.inputs, *(one.outputs[0] for one in _sides(op, control))],
    )
    ops = [op for op in ordered if op in inside]
    return Cut(found, ops, {op: list(op.inputs) for op in ops})


def _sides(op: tf.Operation, control: switching.Flow) -> list[tf.Operation]:
    """Returns what has an op run on one side of a conditional only."""
    if op not in control:
        return []
    return [one for one in op.control_inputs if one in control and one.outputs]


def is_light(made: Cut) -> bool:
    """Whether a value is computed once more in next to no time: without products."""
    return not any(op.type.startswith(_HEAVY) or kind_of(op).calls for op in made.ops)


def joins(value: Value, rows: bool = True) -> bool:
    """Whether the values of the replicas can be put together to that of one device."""
    if value.mixed is not None or value.wholes:
        return False
    if value.kind is Kind.ROWS:
        return rows and not value.order
    return value.kind in (Kind.SAME, Kind.MEAN, Kind.MAX, Kind.MIN)


def _is_pure(op: tf.Operation, control: switching.Flow) -> bool:
    """Whether an op computes the same of the same, wherever it is."""
    if op.type in SWITCHING and op.type not in ("Switch", "Merge"):
        return False
    if any(isinstance(one, switching.Loop) for one in control.path(op)):
        return False
    if not op.inputs and op.type != "Const":
        return False
    if has_effect(op) or flows.draws(op) or resource_inputs(op):
        return False
    if kind_of(op).calls:
        bodies = _tf.called_graphs(op)
        ops = [inner for _, body in bodies for inner in body.get_operations()]
        return bool(bodies) and not any(map(has_effect, ops))
    return True


def again(
    made: Cut,
    tensor: tf.Tensor,
    join: Callable[[tf.Tensor, Value], tf.Tensor],
    device: str = "",
) -> tf.Tensor:
    """Computes a value once more, of what is put together; returns it.

    Args:
        made: Of what, and how.
        tensor: The value.
        join: Returns a leaf of the whole batch, in the default graph.
        device: Where it is computed.
    """
    whole = {t.ref(): join(t, value) for t, value in made.leaves}
    for op, before in made.inputs.items():
        for one, was in zip(op.inputs, before, strict=True):
            if was.ref() in whole:
                whole[one.ref()] = whole[was.ref()]
    graph = tf.compat.v1.get_default_graph()
    if graph is not tensor.graph:
        _tf.copy_functions(tensor.graph, graph)
    stamp = stamping.Stamp(tensor.graph, made.ops)
    scope = graph.unique_name("AutoDist/whole") + "/"
    places = stamp.press(
        graph, scope, lambda one: whole[one.ref()], lambda op: device, {}
    )
    return stamping.of(places, tensor)


def share_of(power: float, share: tf.Tensor) -> tf.Tensor:
    """Returns what a value of a replica counts, given its share of the examples."""
    if power == 0:
        return share
    has_any = tf.cast(share > 0, share.dtype)
    if power == 1:
        return has_any
    return has_any * tf.pow(tf.maximum(share, 1e-30), 1 - power)


def part_of(own: tf.Tensor, total: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns a replica's part of what a loss is divided by.

    Where that is nothing, the loss is what it is on one device, be it no number.
    """
    return tf.where(tf.equal(total, 0), share, tf.math.divide_no_nan(own, total))


def of_parts(
    value: Value, parts: Sequence[tf.Tensor], shares: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Returns a value of the whole batch, given those of the replicas' parts.

    Args:
        value: What is known of it.
        parts: That of each replica.
        shares: Each replica's share of the examples; those without count nothing.
    """
    first = parts[0]
    if kinds.is_same(value):
        return first
    if value.kind is Kind.ROWS:
        return _rows(value, parts, shares)
    if value.kind in (Kind.MAX, Kind.MIN):  # who has no example is lent one
        return _extreme(first.dtype, value.kind)(tf.stack(list(parts)), 0)
    own = [
        _weighed(part, share_of(value.power, share))
        for part, share in zip(parts, shares, strict=True)
    ]
    return _narrowed(tf.add_n(own), first.dtype)


def of_all(value: Value, own: tf.Tensor, weight: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns a value of the whole batch, which the replicas tell one another.

    Args:
        value: What is known of it; it has no rows.
        own: That of the replica that is being built.
        weight: Returns what that counts in the sum over all.
    """
    if kinds.is_same(value):
        return own
    how = {Kind.MAX: "max", Kind.MIN: "min"}.get(value.kind, "sum")
    summed = _weighed(own, weight()) if how == "sum" else own
    (made,) = all_reduce.combine([summed], how, None)
    return _narrowed(made, own.dtype)


def _weighed(own: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns what a replica adds to a sum: nothing if it weighs 0, whatever it is."""
    wide = _wide(own.dtype)
    weighed = tf.cast(own, wide) * tf.cast(weight, wide)
    return tf.where(weight > 0, weighed, tf.zeros_like(weighed))


def _wide(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which sums of fractions are exact enough."""
    if dtype.is_floating or dtype.is_complex:
        return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
    return tf.float64


def _narrowed(total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    rounded = total.dtype == tf.float64 and not dtype.is_floating
    return tf.cast(tf.round(total) if rounded else total, dtype)


def _rows(
    value: Value, parts: Sequence[tf.Tensor], shares: Sequence[tf.Tensor]
) -> tf.Tensor:
    made = []
    for part, share in zip(parts, shares, strict=True):
        if value.power:
            part = part * tf.cast(tf.pow(share, -value.power), part.dtype)
        sizes = tf.shape(part)
        has = tf.where(share > 0, sizes[value.axis], 0)
        at = [slice(None)] * value.axis + [slice(None, has)]
        made.append(part[tuple(at)])
    return tf.concat(made, value.axis)


def _extreme(dtype: tf.DType, kind: Kind) -> Callable[..., tf.Tensor]:
    if dtype == tf.bool:
        found = tf.reduce_any if kind is Kind.MAX else tf.reduce_all
    else:
        found = tf.reduce_max if kind is Kind.MAX else tf.reduce_min
    made: Callable[..., tf.Tensor] = found
    return made
