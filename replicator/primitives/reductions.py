# SPDX-License-Identifier: Apache-2.0
"""The table of reductions: what each means, how it combines, where gradients go.

Shared by all primitives that reduce: all_reduce, reduce and reduce_scatter. A reduction
combines one tensor per replica, element by element and in replica order. Its gradient
has two halves: the primitive brings the gradients of the result to every replica, and
`share` computes the replica's part of them for its own operand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replicator import context, errors
from replicator.graph.ir.placeholder import Call, Value
from replicator.primitives import arithmetic, base, shares

# Takes one tensor per replica, in replica order.
Fold = Callable[[Sequence[tf.Tensor]], tf.Tensor]

# Takes two tensors of one shape and dtype.
Pair = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class Extremum(NamedTuple):
    """The result of "argmin" or "argmax" for one tensor.

    Example:
        >>> losses = [4.0, 2.0]
        >>> best = repl.run(lambda: repl.all_reduce(losses[repl.replica_id], "argmin"))
        >>> float(best.value), int(best.owner)
        (2.0, 1)

    Attributes:
        value: The smallest or largest of the replicas' values, of the tensor's dtype
            and shape.
        owner: int32 of the same shape: the id of the replica that holds it, the lowest
            if several do.
    """

    value: Any
    owner: Any


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One way to combine several tensors into one.

    Attributes:
        kinds: The kinds of dtypes for which it is defined.
        fix: What to do instead for other dtypes.
        pair: Combines two numeric tensors.
        booleans: Combines two boolean tensors; `pair` by default.
        fold: Combines one tensor per replica, in order; repeated `pair` by default.
        share: The gradients of the operands; None if it is not differentiable.
        located: Whether the result includes the id of the replica that holds it.
        rounds: Whether 16-bit floats are combined in float32 and rounded at the end.
        mean: Whether the result is divided by the number of replicas.
    """

    kinds: tuple[str, ...]
    fix: str
    pair: Pair
    booleans: Pair | None = None
    fold: Fold | None = None
    share: shares.Share | None = None
    located: bool = False
    rounds: bool = False
    mean: bool = False


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a reduction, for algorithms that combine pair by pair.

    Attributes:
        widen: Converts a replica's tensor to the form that is combined.
        pair: Combines two widened tensors of one shape.
        finish: Converts the combination of all tensors to the result.
    """

    widen: Callable[[tf.Tensor], tf.Tensor]
    pair: Pair
    finish: Callable[[tf.Tensor], tf.Tensor]


_SMALL = ("int2", "int4", "uint2", "uint4", "float4", "float8")


def check(what: str, leaf: tf.Tensor | tf.IndexedSlices, op: Any) -> None:
    """Raises ArgumentError unless `op` is defined for the leaf.

    Args:
        what: The primitive, for the message.
        leaf: The value to be reduced.
        op: The user's argument.
    """
    check_op(what, op)
    if isinstance(leaf, tf.IndexedSlices) and op not in ("sum", "mean"):
        raise base.bad_argument(
            what,
            f"was asked for the {op} of IndexedSlices",
            "IndexedSlices have a sum and a mean; convert them with "
            "tf.convert_to_tensor for anything else.",
        )
    dtype = tf.as_dtype(leaf.dtype)
    kind = _kind(dtype)
    if kind not in REDUCTIONS[op].kinds:
        raise base.bad_argument(
            what,
            f"was asked for the {op} of {dtype.name} tensors",
            REDUCTIONS[op].fix if kind else "only numbers can be reduced.",
        )


def check_op(what: str, op: Any) -> None:
    """Raises ArgumentError unless `op` names a reduction."""
    if not isinstance(op, str) or op not in REDUCTIONS:
        raise base.bad_argument(
            what,
            f"was given op={errors.repr_of(op)}",
            f"op is one of {', '.join(REDUCTIONS)}.",
        )


def refuse_equal_weights(what: str, op: str) -> None:
    """Raises ArgumentError for a mean that weights replicas equally, not examples.

    all_reduce and gradients weight examples; a program that mixes both would be
    silently wrong wherever a batch does not divide evenly.
    """
    if op == "mean" and context.require(what).examples is not None:
        raise base.bad_argument(
            what,
            "was given op='mean', which counts all replicas the same, and they may "
            "have different numbers of examples",
            'take all_reduce(x, "mean"), which weights them; or the sum of the values '
            f"multiplied by the replica's share, {what}(x * repl.weight), or by "
            "1 / repl.num_replicas.",
        )


def _kind(dtype: tf.DType) -> str:
    """Returns the kind of a dtype; "" if it is not numeric."""
    if dtype == tf.bool:
        return "bool"
    if dtype.name.startswith(_SMALL):  # TensorFlow has no arithmetic for these
        return ""
    kinds = ("integer", "complex", "floating")
    return next((kind for kind in kinds if getattr(dtype, f"is_{kind}")), "")


def results(op: str, tensors: Sequence[tf.Tensor]) -> list[Value]:
    """Returns dtype and static shape of each result of reducing the tensors.

    For "argmin" and "argmax" all values come first, then all owners.
    """
    values = [Value.of(tensor) for tensor in tensors]
    if not REDUCTIONS[op].located:
        return values
    return [*values, *(Value("int32", value.shape) for value in values)]


def as_leaves(op: str, received: Sequence[Any]) -> list[Any]:
    """Converts received tensors, ordered as in `results`, to the leaves users see."""
    if not REDUCTIONS[op].located:
        return list(received)
    count = len(received) // 2
    return list(map(Extremum, received[:count], received[count:]))


def of_leaves(
    received: Sequence[tf.Tensor], leaves: Sequence[int], count: int
) -> list[tf.Tensor]:
    """Picks the results of some of `count` leaves: their values, then their owners."""
    return [
        received[start + k] for start in range(0, len(received), count) for k in leaves
    ]


def combine(
    op: str,
    column: Sequence[tf.Tensor],
    group: Sequence[int],
    steps: Steps | None = None,
) -> list[tf.Tensor]:
    """Reduces one tensor per replica, in replica order.

    Args:
        op: One of REDUCTIONS, defined for the dtype.
        column: `column[n]` is the tensor of replica `group[n]`; all have one shape,
            which unknown_shapes.py has compared if it is statically unknown.
        group: The participating replicas.
        steps: If `column` holds partial results: the steps of the whole reduction.

    Returns:
        The result; for "argmin" and "argmax" also the owner.
    """
    steps = steps or steps_of(op, column[0].dtype, len(column))
    value = steps.finish(partial(op, column, steps))
    if not REDUCTIONS[op].located:
        return [value]
    holders = [arithmetic.holds(x, value) for x in column]
    owner = tf.fill(tf.shape(value), tf.constant(group[-1], tf.int32))
    for replica_id, mask in reversed(list(zip(group[:-1], holders[:-1], strict=True))):
        owner = tf.where(mask, replica_id, owner)
    return [value, arithmetic.ensure_shape(owner, value.shape)]


def partial(op: str, column: Sequence[tf.Tensor], steps: Steps) -> tf.Tensor:
    """Combines some of the tensors of a reduction, in order, without finishing it.

    Args:
        op: One of REDUCTIONS, defined for the dtype.
        column: Tensors, or partial results of this function.
        steps: The steps of the whole reduction.
    """
    wide = [steps.widen(x) for x in column]
    in_order = REDUCTIONS[op].fold
    if in_order is not None:
        return in_order(wide)
    return arithmetic.fold(steps.pair, wide)


def settle(
    op: str, values: Sequence[tf.Tensor], owners: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Combines several partial results of "argmin" or "argmax" into one.

    Args:
        op: "argmin" or "argmax".
        values: `values[h]` and
        owners: `owners[h]` are the results of `combine` for some of the replicas.

    Returns:
        The result of `combine` for all of them; of several owners, the lowest.
    """
    steps = steps_of(op, values[0].dtype, len(values))
    value = partial(op, values, steps)
    nobody = tf.constant(tf.int32.max)
    ids = [
        tf.where(arithmetic.holds(x, value), owner, nobody)
        for x, owner in zip(values, owners, strict=True)
    ]
    return [value, arithmetic.fold(tf.minimum, ids)]


def steps_of(op: str, dtype: tf.DType, count: int) -> Steps:
    """Returns the steps of a reduction; for "argmin" and "argmax" those of their value.

    Args:
        op: One of REDUCTIONS, defined for the dtype.
        dtype: The dtype of the replicas' tensors.
        count: The number of replicas.
    """
    reduction = REDUCTIONS[op]
    wide = reduction.rounds and dtype in base.HALF

    def widen(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(x, tf.float32) if wide else x

    def finish(x: tf.Tensor) -> tf.Tensor:
        scaled = arithmetic.divide(x, count) if reduction.mean else x
        return tf.cast(scaled, dtype) if wide else scaled

    pair = reduction.pair
    if dtype == tf.bool and reduction.booleans is not None:
        pair = reduction.booleans
    return Steps(widen, pair, finish)


def share(
    op: str,
    operands: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    totals: Sequence[tf.Tensor],
    of: Call,
) -> list[tf.Tensor]:
    """Returns the gradients of one replica's operands of a reduction.

    Every participating replica must call this, since it may communicate.

    Args:
        op: The reduction.
        operands: The replica's floating or complex operands.
        results: The reduction's results, ordered as in `results`.
        totals: The gradient of the sum of all losses by each value.
        of: The call being differentiated.

    Returns:
        One gradient per operand.
    """
    share_of = REDUCTIONS[op].share
    assert share_of is not None, f"{op} has no gradient"
    return share_of(shares.Reduced(operands, results, totals, of))


# --- Pairs -----------------------------------------------------------------


def _add(one: tf.Tensor, two: tf.Tensor) -> tf.Tensor:
    """Adds two tensors; fails at run time if their shapes differ."""
    return tf.add_n([one, two])


# --- The table ------------------------------------------------------------------------

_BITS = (
    ("integer", "bool"),
    "only integers and booleans are combined bit by bit; tf.bitcast to integers first.",
)
_TRUTH = (
    ("bool",),
    "compare first, e.g. x != 0; for the bits of integers see bitwise_*.",
)
_ORDER = ("floating", "integer"), "cast booleans to int; complex numbers have no order."

_ARGMIN = Reduction(*_ORDER, tf.minimum, share=shares.to_owner, located=True)

REDUCTIONS = {
    "sum": Reduction(
        ("floating", "complex", "integer"),
        'to count booleans, cast to int; "logical_and" and "logical_or" combine them.',
        _add,
        fold=arithmetic.add_in_order,
        share=shares.to_all,
        rounds=True,
    ),
    "mean": Reduction(
        ("floating", "complex"),
        "cast to a float first; an integer mean would round.",
        _add,
        fold=arithmetic.add_in_order,
        share=shares.in_equal_parts,
        rounds=True,
        mean=True,
    ),
    "min": Reduction(
        ("floating", "integer", "bool"),
        "complex numbers have no order.",
        tf.minimum,
        tf.logical_and,
        share=shares.to_holders,
    ),
    "max": Reduction(
        ("floating", "integer", "bool"),
        "complex numbers have no order.",
        tf.maximum,
        tf.logical_or,
        share=shares.to_holders,
    ),
    "prod": Reduction(
        ("floating", "complex", "integer"),
        'the product of booleans is "logical_and".',
        tf.multiply,
        share=shares.times_others,
        rounds=True,
    ),
    "argmin": _ARGMIN,
    "argmax": dataclasses.replace(_ARGMIN, pair=tf.maximum),
    "bitwise_and": Reduction(*_BITS, tf.bitwise.bitwise_and, tf.logical_and),
    "bitwise_or": Reduction(*_BITS, tf.bitwise.bitwise_or, tf.logical_or),
    "bitwise_xor": Reduction(*_BITS, tf.bitwise.bitwise_xor, tf.math.logical_xor),
    "logical_and": Reduction(*_TRUTH, tf.logical_and),
    "logical_or": Reduction(*_TRUTH, tf.logical_or),
}
