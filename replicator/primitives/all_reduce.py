"""all_reduce: one reduction over all replicas, its result on every replica.

Meaning: every replica receives op(x_0, x_1, ..., x_{R-1}), element by element.
Dual: sum and mean are their own; min and max send the gradient to the replicas that
hold the extremum; prod multiplies it by the other replicas' values.
Lowering: one device (the hub) reduces in replica order, every device reads the result,
so that all replicas hold the same bits.

Source: the convention that what is differentiated is the sum of all replicas' losses is
that of JAX's psum and torch's functional collectives; Horovod averages some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.graph import cost
from replicator.graph.placeholder import Call, Placeholder, Value
from replicator.graph.rewrite import Matched
from replicator.primitives import all_gather, base

OPS = ("sum", "mean", "min", "max", "prod")


def all_reduce(value: Any, op: str = "sum", weight: Any = None) -> Any:
    """Reduces over all replicas and gives every replica the result.

    Args:
        value: A nest of tensors, alike in dtype and shape on all replicas. Floating
            dtypes; complex but for "min" and "max"; integers but for "mean"; bool for
            "min" (and) and "max" (or). IndexedSlices stay sparse, for "sum" and "mean":
            the rows of all replicas stand behind one another. 16-bit floats are added
            up and multiplied in float32.
        op: "sum", "mean", "min", "max" or "prod".
        weight: For "mean": a scalar per replica, e.g. its number of examples. The
            result is sum(weight_r * x_r) / sum(weight_r); a replica of weight 0 does
            not contribute, whatever its value (NaN included); if all weigh 0, it is 0.

    Returns:
        A nest like `value`, the same bits on every replica, on this replica's device.

    Raises:
        ArgumentError: `op` is unknown or has no meaning for a dtype.
        ContextError: Called outside a step.
    """
    context.require("all_reduce")
    if op not in OPS:
        raise base.bad_argument(
            "all_reduce", f"was given op={op!r}", f"op is one of {', '.join(OPS)}."
        )
    leaves = base.flatten(value, "all_reduce")
    for leaf in leaves:
        _check(leaf, op)
    if not leaves:
        return value
    reduced = (
        _reduce_leaves(leaves, op)
        if weight is None
        else _weighted_mean(leaves, op, weight)
    )
    return tf.nest.pack_sequence_as(value, reduced)


def _check(leaf: tf.Tensor | tf.IndexedSlices, op: str) -> None:
    """Raises ArgumentError unless `op` has a meaning for the leaf."""
    dtype = tf.as_dtype(leaf.dtype)
    name = f"was asked for the {op} of {dtype.name} tensors"
    if isinstance(leaf, tf.IndexedSlices):
        if op not in ("sum", "mean"):
            raise base.bad_argument(
                "all_reduce",
                f"was asked for the {op} of IndexedSlices",
                "IndexedSlices have a sum and a mean; convert them with "
                "tf.convert_to_tensor for anything else.",
            )
    if dtype == tf.bool:
        if op not in ("min", "max"):
            raise base.bad_argument(
                "all_reduce", name, '"min" is and, "max" is or; to count, cast to int.'
            )
    elif dtype.is_integer:
        if op == "mean":
            raise base.bad_argument(
                "all_reduce",
                name,
                "an integer mean would round; cast to a float first.",
            )
    elif dtype.is_complex:
        if op in ("min", "max"):
            raise base.bad_argument(
                "all_reduce", name, "complex numbers have no order."
            )
    elif not dtype.is_floating:
        raise base.bad_argument("all_reduce", name, "only numbers can be reduced.")


def _reduce_leaves(
    leaves: Sequence[tf.Tensor | tf.IndexedSlices], op: str
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduces dense leaves in one call and sparse ones by gathering their rows."""
    dense = [leaf for leaf in leaves if not isinstance(leaf, tf.IndexedSlices)]
    results = iter(reduce_dense(dense, op) if dense else [])
    return [
        _reduce_sparse(leaf, op)
        if isinstance(leaf, tf.IndexedSlices)
        else next(results)
        for leaf in leaves
    ]


def reduce_dense(
    tensors: Sequence[tf.Tensor],
    op: str,
    when: tf.Tensor | None = None,
    of: Call | None = None,
) -> list[tf.Tensor]:
    """Puts one all_reduce call for several tensors into the graph.

    Args:
        tensors: At least one dense tensor.
        op: One of OPS, with a meaning for every dtype.
        when: A bool scalar, equal on all replicas by construction. Where it is False at
            run time nothing is reduced, and zeros come back.
        of: Inside a gradient: the call that is differentiated.

    Returns:
        The reduced tensors.
    """
    results = [Value.of(t) for t in tensors]
    if when is None:
        return base.communicate(
            "all_reduce", {"op": op}, tensors, results, gradient, of=of
        )
    return base.communicate(
        "all_reduce", {"op": op, "when": True}, [*tensors, when], results, None
    )


def _reduce_sparse(slices: tf.IndexedSlices, op: str) -> tf.IndexedSlices:
    """Puts the rows of all replicas behind one another; duplicates add up when used."""
    values, indices = all_gather.all_gather([slices.values, slices.indices], axis=0)
    if op == "mean":
        values = _divide(values, context.require("all_reduce").num_replicas)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _weighted_mean(
    leaves: Sequence[tf.Tensor | tf.IndexedSlices], op: str, weight: Any
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Sums the weighted values and the weights in one call, and divides."""
    if op != "mean":
        raise base.bad_argument(
            "all_reduce",
            f"was given a weight with op={op!r}",
            'weights go with "mean".',
        )
    weight = _as_weight(weight)

    def weighted(x: tf.Tensor) -> tf.Tensor:
        if x.dtype in base.HALF:
            x = tf.cast(x, tf.float32)
        factor = tf.cast(weight, x.dtype)
        nothing = tf.zeros_like(x)
        # Twice, so that a NaN neither passes nor comes back through the gradient.
        return tf.where(
            factor == 0, nothing, tf.where(factor == 0, nothing, x) * factor
        )

    scaled = [_map_values(weighted, leaf) for leaf in leaves]
    *sums, total = _reduce_leaves([*scaled, weight], "sum")

    def divided(x: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tf.math.divide_no_nan(x, tf.cast(total, x.dtype)), dtype)

    return [
        _map_values(functools.partial(divided, dtype=leaf.dtype), summed)
        for leaf, summed in zip(leaves, sums, strict=True)
    ]


def _as_weight(weight: Any) -> tf.Tensor:
    """Returns a weight as a scalar, wide enough to add up counts exactly."""
    given = base.flatten(weight, "all_reduce")
    for k, x in enumerate(given):
        number = x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool
        if k or not number or x.shape.rank not in (0, None):
            raise base.bad_argument(
                "all_reduce",
                f"was given weight={weight!r}",
                "the weight is one real number per replica, e.g. its number of "
                "examples.",
            )
    return tf.cast(tf.ensure_shape(given[0], []), tf.float64)


def _map_values(
    function: Callable[[tf.Tensor], tf.Tensor], leaf: tf.Tensor | tf.IndexedSlices
) -> tf.Tensor | tf.IndexedSlices:
    """Applies a function to a tensor, or to the rows of IndexedSlices."""
    if not isinstance(leaf, tf.IndexedSlices):
        return function(leaf)
    return tf.IndexedSlices(function(leaf.values), leaf.indices, leaf.dense_shape)


def sum_floating(tensors: Sequence[tf.Tensor], of: Call) -> list[tf.Tensor | None]:
    """Sums the tensors through which gradients flow; None for the others."""
    flowing = [t for t in tensors if base.is_differentiable(t)]
    sums = iter(reduce_dense(flowing, "sum", of=of) if flowing else [])
    return [next(sums) if base.is_differentiable(t) else None for t in tensors]


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Builds the dual of an all_reduce; see the module's docstring."""
    op = placed.call.options["op"]
    flowing = [k for k, d in enumerate(upstream) if base.is_differentiable(d)]
    if not flowing:
        return [None] * len(upstream)
    operands = [placed.operands[k] for k in flowing]
    results = [placed.results[k] for k in flowing]
    arrived = [upstream[k] for k in flowing]
    if op in ("sum", "mean"):
        back = reduce_dense(arrived, op, of=placed.call)
    elif op == "prod":
        back = _prod_gradient(operands, arrived, placed.call)
    else:
        back = _extremum_gradient(operands, results, arrived, placed.call)
    gradients: list[tf.Tensor | None] = [None] * len(upstream)
    for k, d in zip(flowing, back, strict=True):
        gradients[k] = d
    return gradients


def _extremum_gradient(
    operands: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    upstream: Sequence[tf.Tensor],
    of: Call,
) -> list[tf.Tensor]:
    """To the replicas that hold the extremum; where several do, in equal shares."""
    held = [
        tf.cast(tf.equal(x, y), x.dtype) for x, y in zip(operands, results, strict=True)
    ]
    sums = reduce_dense([*upstream, *held], "sum", of=of)
    totals, holders = sums[: len(upstream)], sums[len(upstream) :]
    return [
        mine * tf.math.divide_no_nan(total, tf.stop_gradient(count))
        for mine, total, count in zip(held, totals, holders, strict=True)
    ]


def _prod_gradient(
    operands: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor], of: Call
) -> list[tf.Tensor]:
    """The summed gradient times the product of the other replicas' values.

    Multiplied out rather than divided by the own value, which may be zero.
    """
    replica = context.require("the gradient of all_reduce")
    totals = reduce_dense(upstream, "sum", of=of)
    everyone = all_gather.gather_dense(operands, None, of=of)
    own = tf.one_hot(replica.replica_id, replica.num_replicas, True, False)
    back = []
    for total, values in zip(totals, everyone, strict=True):
        rank = tf.concat(
            [[replica.num_replicas], tf.ones([tf.rank(total)], tf.int32)], 0
        )
        others = tf.where(tf.reshape(own, rank), tf.ones_like(values), values)
        back.append(total * tf.math.conj(tf.reduce_prod(others, axis=0)))
    return back


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Reduces on a hub, in replica order; all devices read the result.

    Small tensors are packed into buckets first, which leaves the order of each
    element's sum as it is. Moves 2 * (replicas - 1) * bytes(value): in to the hub, and
    out again.
    """
    count = len(matched.operands[0])
    when = None
    if matched.options.get("when"):
        count -= 1
        when = matched.operands[0][count]
    results: list[list[Any]] = [[None] * count for _ in matched.operands]
    for bucket in cost.buckets([matched.column(k) for k in range(count)]):
        for own, reduced in zip(results, _reduce(matched, bucket, when), strict=True):
            for k, tensor in zip(bucket, reduced, strict=True):
                own[k] = tensor
    return results


def _reduce(
    matched: Matched, bucket: Sequence[int], when: tf.Tensor | None
) -> Sequence[Sequence[tf.Tensor]]:
    """Reduces the tensors of one bucket; returns them by replica."""
    if len(bucket) == 1:
        reduced = [_on_hub(matched, matched.column(bucket[0]), when)]
        return [reduced for _ in matched.operands]
    shapes = [matched.operands[0][k].shape for k in bucket]
    packs = []
    for device, own in zip(matched.devices, matched.operands, strict=True):
        with tf.device(device):
            packs.append(tf.concat([_as_rows(own[k]) for k in bucket], 0))
    total = _on_hub(matched, packs, when)
    return [_unpack(total, shapes, device) for device in matched.devices]


def _unpack(
    pack: tf.Tensor, shapes: Sequence[tf.TensorShape], device: str
) -> list[tf.Tensor]:
    """Splits joined rows into tensors of these shapes, on a device."""
    with tf.device(device):
        pieces = tf.split(pack, [shape[0] if shape.rank else 1 for shape in shapes])
        return [
            piece if shape.rank else tf.reshape(piece, [])
            for piece, shape in zip(pieces, shapes, strict=True)
        ]


def _as_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Makes a scalar one row; any other tensor has rows that can be joined as it is."""
    return tensor if tensor.shape.rank else tf.reshape(tensor, [1])


def _on_hub(
    matched: Matched, column: Sequence[tf.Tensor], when: tf.Tensor | None
) -> tf.Tensor:
    """Reduces one tensor per replica on the device with the least to do so far."""
    op = matched.options["op"]
    hub = matched.hubs.next(cost.tensor_bytes(column[0]))
    with tf.device(hub):
        if when is None:
            return _combine(column, op)
        return tf.cond(
            when,
            lambda: _combine(column, op),
            lambda: tf.zeros_like(column[0]),
        )


def _combine(column: Sequence[tf.Tensor], op: str) -> tf.Tensor:
    """Reduces one tensor per replica to one, in replica order."""
    dtype = column[0].dtype
    if dtype in base.HALF and op in ("mean", "prod"):
        wide = [tf.cast(x, tf.float32) for x in column]
        return tf.cast(_combine(wide, op), dtype)
    if op in ("sum", "mean"):
        total = base.add_in_order(column)
        return _divide(total, len(column)) if op == "mean" else total
    if not all(x.shape.is_fully_defined() for x in column):
        # Packing compares the shapes when it runs; an elementwise op would broadcast.
        column = tf.unstack(tf.stack(column), num=len(column))
    return base.fold(_elementwise(op, dtype), column)


def _divide(total: tf.Tensor, count: int) -> tf.Tensor:
    """Divides by a number that is not 0.

    Grappler makes a plain division by a constant a multiplication by its reciprocal.
    """
    return tf.math.divide_no_nan(total, tf.cast(count, total.dtype))


def _elementwise(op: str, dtype: tf.DType) -> Callable[..., tf.Tensor]:
    if dtype == tf.bool:
        return tf.logical_and if op == "min" else tf.logical_or
    return {"min": tf.minimum, "max": tf.maximum, "prod": tf.multiply}[op]
