# SPDX-License-Identifier: Apache-2.0
"""Computes values of the whole batch: joins those of the replicas, or recomputes them.

The root of a mean is not the mean of roots. So means, sums, extrema and rows are joined
first, and what was computed from them is recomputed from the joined values.
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
_MOST = 2000  # ops that are recomputed


@dataclasses.dataclass(frozen=True)
class Cut:
    """The ops that recompute a tensor, and the joinable tensors they start from.

    Attributes:
        leaves: The tensors that are joined, with their Values.
        ops: The ops between them and the tensor.
        inputs: The inputs of each op, before passes substitute equal ones.
    """

    leaves: list[tuple[tf.Tensor, Value]]
    ops: list[tf.Operation]
    inputs: dict[tf.Operation, list[tf.Tensor]]


def cut(
    known: Values, tensor: tf.Tensor, rows: bool = True, put: bool = False
) -> Cut | None:
    """Returns how a tensor is recomputed from tensors that can be joined.

    Args:
        known: Infers Values.
        tensor: The tensor.
        rows: Whether rows can be joined, too.
        put: Whether operands that must be of the whole batch have been substituted
            already.

    Returns:
        None if an op between draws random numbers, has an effect, calls Python, or is
        in a loop of TensorFlow 1.
    """
    # A part is not computed of what it was cut from, nor of the default of what is fed.
    if known.is_given(tensor) or tensor.op.type == "PlaceholderWithDefault":
        return None
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
        for operand in op.inputs:
            value = known.of(operand)
            if put:
                value = value.replaced(wholes=frozenset())
            is_empty = operand.dtype == tf.variant and not resource_inputs(operand.op)
            # A replica may not have computed what is in one branch of a conditional.
            is_branched = operand.op in control or operand.op.type in SWITCHES
            if joins(value, rows) and not is_empty and not is_branched:
                leaves[operand.ref()] = operand, value
            elif known.is_given(operand):
                return None
            else:
                stack.append(operand.op)
        stack += _sides(op, control)
    joined_leaves = [(t, v) for t, v in leaves.values() if t.op not in inside]
    for operand, value in joined_leaves:
        # A known batch size may be a constant in what is computed.
        has_size = value.kind is Kind.ROWS and operand.shape.rank
        if operand.dtype in (tf.resource, tf.variant) or (
            has_size and shapes.sizes(operand)[value.axis] is not None
        ):
            return None
    ordered = flows.upstream(
        [tensor],
        lambda op: op not in inside,
        lambda op: [*op.inputs, *(side.outputs[0] for side in _sides(op, control))],
    )
    ops = [op for op in ordered if op in inside]
    return Cut(joined_leaves, ops, {op: list(op.inputs) for op in ops})


def _sides(op: tf.Operation, control: switching.Flow) -> list[tf.Operation]:
    """Returns the ops that confine an op to one branch of a conditional."""
    if op not in control:
        return []
    return [
        source for source in op.control_inputs if source in control and source.outputs
    ]


def is_light(made: Cut) -> bool:
    """Whether recomputation takes next to no time: it has no matrix products."""
    return not any(op.type.startswith(_HEAVY) or kind_of(op).calls for op in made.ops)


def joins(value: Value, rows: bool = True) -> bool:
    """Whether the replicas' values can be joined to that of one device."""
    if value.mixed is not None or value.wholes:
        return False
    if value.kind is Kind.ROWS:
        return rows and not value.order
    return value.kind in (Kind.SAME, Kind.MEAN, Kind.MAX, Kind.MIN)


def _is_pure(op: tf.Operation, control: switching.Flow) -> bool:
    """Whether an op computes the same from the same inputs, wherever it runs."""
    if op.type in SWITCHING and op.type not in ("Switch", "Merge"):
        return False
    if any(isinstance(part, switching.Loop) for part in control.path(op)):
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
    """Recomputes a tensor from joined tensors; returns it.

    Args:
        made: The joined tensors and the ops.
        tensor: The tensor.
        join: Returns a leaf of the whole batch, in the default graph.
        device: The device that recomputes it.
    """
    joined_tensors = {t.ref(): join(t, value) for t, value in made.leaves}
    for op, inputs_before in made.inputs.items():
        for operand, operand_before in zip(op.inputs, inputs_before, strict=True):
            if operand_before.ref() in joined_tensors:
                joined_tensors[operand.ref()] = joined_tensors[operand_before.ref()]
    graph = tf.compat.v1.get_default_graph()
    if graph is not tensor.graph:
        _tf.copy_functions(tensor.graph, graph)
    stamp = stamping.Stamp(tensor.graph, made.ops)
    scope = graph.unique_name("AutoDist/whole") + "/"
    places = stamp.press(
        graph, scope, lambda one: joined_tensors[one.ref()], lambda op: device, {}
    )
    return stamping.of(places, tensor)


def share_of(power: float, share: tf.Tensor) -> tf.Tensor:
    """Returns the weight of a replica's value, given its share of the examples."""
    if power == 0:
        return share
    has_any = tf.cast(share > 0, share.dtype)
    if power == 1:
        return has_any
    return has_any * tf.pow(tf.maximum(share, 1e-30), 1 - power)


def part_of(own: tf.Tensor, total: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """Returns a replica's fraction of the divisor of a loss.

    Where the divisor is 0, the loss is what it is on one device, even NaN.
    """
    return tf.where(tf.equal(total, 0), share, tf.math.divide_no_nan(own, total))


def of_parts(
    value: Value, parts: Sequence[tf.Tensor], shares: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Returns a value of the whole batch, given those of the replicas' parts.

    Args:
        value: What is known of it.
        parts: The value of each replica.
        shares: Each replica's share of the examples; those without any have no weight.
    """
    first = parts[0]
    if kinds.is_same(value):
        return first
    if value.kind is Kind.ROWS:
        return _rows(value, parts, shares)
    if value.kind in (Kind.MAX, Kind.MIN):  # replicas without examples are lent one
        return _extreme(first.dtype, value.kind)(tf.stack(list(parts)), 0)
    terms = [
        _weighed(part, share_of(value.power, share))
        for part, share in zip(parts, shares, strict=True)
    ]
    return _narrowed(tf.add_n(terms), first.dtype)


def of_all(value: Value, own: tf.Tensor, weight: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns a value of the whole batch, reduced over the replicas.

    Args:
        value: What is known of it; it has no rows.
        own: That of the replica that is being built.
        weight: Returns its weight in the sum over all replicas.
    """
    if kinds.is_same(value):
        return own
    reduction = {Kind.MAX: "max", Kind.MIN: "min"}.get(value.kind, "sum")
    operand = _weighed(own, weight()) if reduction == "sum" else own
    (result,) = all_reduce.combine([operand], reduction, None)
    return _narrowed(result, own.dtype)


def _weighed(own: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns a replica's term of a sum: 0 if its weight is 0, even for NaN."""
    wide = _wide(own.dtype)
    weighed = tf.cast(own, wide) * tf.cast(weight, wide)
    return tf.where(weight > 0, weighed, tf.zeros_like(weighed))


def _wide(dtype: tf.DType) -> tf.DType:
    """Returns a dtype in which sums of fractions are exact enough."""
    if dtype.is_floating or dtype.is_complex:
        return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype
    return tf.float64


def _narrowed(total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    rounded = total.dtype == tf.float64 and not dtype.is_floating
    return tf.cast(tf.round(total) if rounded else total, dtype)


def _rows(
    value: Value, parts: Sequence[tf.Tensor], shares: Sequence[tf.Tensor]
) -> tf.Tensor:
    pieces = []
    for part, share in zip(parts, shares, strict=True):
        if value.power:
            part = part * tf.cast(tf.pow(share, -value.power), part.dtype)
        sizes = tf.shape(part)
        num_rows = tf.where(share > 0, sizes[value.axis], 0)
        index = [slice(None)] * value.axis + [slice(None, num_rows)]
        pieces.append(part[tuple(index)])
    return tf.concat(pieces, value.axis)


def _extreme(dtype: tf.DType, kind: Kind) -> Callable[..., tf.Tensor]:
    if dtype == tf.bool:
        reduce = tf.reduce_any if kind is Kind.MAX else tf.reduce_all
    else:
        reduce = tf.reduce_max if kind is Kind.MAX else tf.reduce_min
    result: Callable[..., tf.Tensor] = reduce
    return result
