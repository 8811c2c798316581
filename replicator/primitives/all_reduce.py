"""all_reduce: one reduction over all replicas, its result on every replica.

Meaning: every replica receives op(x_0, x_1, ..., x_{R-1}), element by element.
Dual: sum and mean are their own; min and max send the gradient to the replicas that hold
the extremum; prod multiplies it by the other replicas' values.
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
from replicator.graph.placeholder import Placeholder, Value
from replicator.graph.rewrite import Matched
from replicator.primitives import all_gather, base

OPS = ("sum", "mean", "min", "max", "prod")
_HALF = (tf.float16, tf.bfloat16)


def all_reduce(value: Any, op: str = "sum", weight: Any = None) -> Any:
    """Reduces over all replicas and gives every replica the result.

    Args:
        value: A nest of tensors, alike in dtype and shape on all replicas. Floating and
            complex dtypes; integers but for "mean"; bool for "min" (and) and "max" (or).
            IndexedSlices stay sparse, for "sum" and "mean": the rows of all replicas
            stand behind one another. 16-bit floats are added up in float32.
        op: "sum", "mean", "min", "max" or "prod".
        weight: For "mean": a scalar per replica, e.g. its number of examples. The result
            is sum(weight_r * x_r) / sum(weight_r); a replica of weight 0 does not
            contribute, whatever its value (NaN included); if all weigh 0, it is 0.

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
    tensors: Sequence[tf.Tensor], op: str, when: tf.Tensor | None = None
) -> list[tf.Tensor]:
    """Puts one all_reduce call for several tensors into the graph.

    Args:
        tensors: At least one dense tensor.
        op: One of OPS, with a meaning for every dtype.
        when: A bool scalar, equal on all replicas by construction. Where it is False at
            run time nothing is reduced, and zeros come back.

    Returns:
        The reduced tensors.
    """
    results = [Value.of(t) for t in tensors]
    if when is None:
        return base.communicate("all_reduce", {"op": op}, tensors, results, gradient)
    return base.communicate(
        "all_reduce", {"op": op, "when": True}, [*tensors, when], results, None
    )


def _reduce_sparse(slices: tf.IndexedSlices, op: str) -> tf.IndexedSlices:
    """Puts the rows of all replicas behind one another; duplicates add up when used."""
    values, indices = all_gather.all_gather([slices.values, slices.indices], axis=0)
    if op == "mean":
        values = values / tf.cast(
            context.require("all_reduce").num_replicas, values.dtype
        )
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
    weight = tf.convert_to_tensor(weight)
    if weight.shape.rank not in (0, None):
        raise base.bad_argument(
            "all_reduce",
            f"was given a weight of shape {weight.shape}",
            "the weight is one number per replica, e.g. its number of examples.",
        )
    weight = tf.cast(weight, tf.float32) if not weight.dtype.is_floating else weight

    def weighted(x: tf.Tensor) -> tf.Tensor:
        factor = tf.cast(weight, x.dtype)
        nothing = tf.zeros_like(x)
        # Twice, so that a NaN neither passes nor comes back through the gradient.
        return tf.where(
            factor == 0, nothing, tf.where(factor == 0, nothing, x) * factor
        )

    scaled = [
        tf.IndexedSlices(weighted(leaf.values), leaf.indices, leaf.dense_shape)
        if isinstance(leaf, tf.IndexedSlices)
        else weighted(leaf)
        for leaf in leaves
    ]
    *sums, total = _reduce_leaves([*scaled, weight], "sum")

    def divided(x: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(x, tf.cast(total, x.dtype))

    return [
        tf.IndexedSlices(divided(leaf.values), leaf.indices, leaf.dense_shape)
        if isinstance(leaf, tf.IndexedSlices)
        else divided(leaf)
        for leaf in sums
    ]


def sum_floating(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
    """Sums the tensors through which gradients flow; None for the others."""
    flowing = [t for t in tensors if base.is_differentiable(t)]
    sums = iter(reduce_dense(flowing, "sum") if flowing else [])
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
        back = reduce_dense(arrived, op)
    elif op == "prod":
        back = _prod_gradient(operands, arrived)
    else:
        back = _extremum_gradient(operands, results, arrived)
    gradients: list[tf.Tensor | None] = [None] * len(upstream)
    for k, d in zip(flowing, back, strict=True):
        gradients[k] = d
    return gradients


def _extremum_gradient(
    operands: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    upstream: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """To the replicas that hold the extremum; where several do, in equal shares."""
    held = [
        tf.cast(tf.equal(x, y), x.dtype) for x, y in zip(operands, results, strict=True)
    ]
    sums = reduce_dense([*upstream, *held], "sum")
    totals, holders = sums[: len(upstream)], sums[len(upstream) :]
    return [
        mine * tf.math.divide_no_nan(total, tf.stop_gradient(count))
        for mine, total, count in zip(held, totals, holders, strict=True)
    ]


def _prod_gradient(
    operands: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The summed gradient times the product of the other replicas' values.

    Multiplied out rather than divided by the own value, which may be zero.
    """
    replica = context.require("the gradient of all_reduce")
    totals = reduce_dense(upstream, "sum")
    everyone = all_gather.all_gather(list(operands))
    own = tf.one_hot(replica.replica_id, replica.num_replicas, True, False)
    back = []
    for total, values in zip(totals, everyone, strict=True):
        rank = tf.concat(
            [[replica.num_replicas], tf.ones([tf.rank(total)], tf.int32)], 0
        )
        others = tf.where(tf.reshape(own, rank), tf.ones_like(values), values)
        back.append(total * tf.reduce_prod(others, axis=0))
    return back


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Reduces each tensor on a hub, in replica order; all devices read the result.

    Moves 2 * (replicas - 1) * bytes(value): in to the hub, and out again.
    """
    count = len(matched.operands[0])
    if not matched.options.get("when"):
        results = [_on_hub(matched, k) for k in range(count)]
    else:
        when = matched.operands[0][count - 1]
        results = [_on_hub(matched, k, when) for k in range(count - 1)]
    return [results for _ in matched.operands]


def _on_hub(matched: Matched, k: int, when: tf.Tensor | None = None) -> tf.Tensor:
    op = matched.options["op"]
    column = matched.column(k)
    hub = matched.hubs.next(cost.tensor_bytes(column[0]))
    static = matched.agreed_shape(k)
    with tf.device(hub):
        if when is None:
            return _combine(column, op, static)
        return tf.cond(
            when,
            lambda: _combine(column, op, static),
            lambda: tf.zeros_like(column[0]),
        )


def _combine(column: Sequence[tf.Tensor], op: str, static: tf.TensorShape) -> tf.Tensor:
    """Reduces one tensor per replica to one, in replica order."""
    dtype = column[0].dtype
    if len(column) == 1:
        return tf.identity(column[0])
    if dtype in _HALF and op in ("sum", "mean", "prod"):
        wide = [tf.cast(x, tf.float32) for x in column]
        return tf.cast(_combine(wide, op, static), dtype)
    if op in ("sum", "mean"):
        # AddN compares the shapes when it runs. Grappler orders its operands by name:
        # the builder names the replicas' scopes so that this is replica order.
        total = tf.add_n(column)
        return total / tf.cast(len(column), dtype) if op == "mean" else total
    if not static.is_fully_defined():
        # Packing compares the shapes when it runs; an elementwise op would broadcast.
        column = tf.unstack(tf.stack(column), num=len(column))
    return functools.reduce(_elementwise(op, dtype), column)


def _elementwise(op: str, dtype: tf.DType) -> Callable[..., tf.Tensor]:
    if dtype == tf.bool:
        return tf.logical_and if op == "min" else tf.logical_or
    return {"min": tf.minimum, "max": tf.maximum, "prod": tf.multiply}[op]
