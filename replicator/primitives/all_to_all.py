# SPDX-License-Identifier: Apache-2.0
"""all_to_all: every replica sends a slice to every replica.

Meaning: a replica splits its tensor along one axis, sends the n-th slice to the n-th
replica, and concatenates the slices it receives along another axis, in replica order.
Dual: all_to_all with the axes exchanged, in slices of the received sizes. Lowering:
every device splits its tensor, and every device concatenates the slices it receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.graph.ir.placeholder import Call, Placeholder, PrimitiveFacts, Value
from replicator.graph.lowering.matched import Matched
from replicator.primitives import (
    arithmetic,
    axes,
    base,
    flows,
    groups,
    rooted,
    unknown_shapes,
)

FACTS = PrimitiveFacts()


def all_to_all(
    value: Any,
    split_axis: int,
    concat_axis: int,
    splits: Any = None,
    group: Any = None,
) -> Any:
    """Sends each replica a slice, and concatenates the slices it receives.

    Example:
        >>> def step_fn():
        ...     x = tf.constant([0, 1]) + 10 * repl.replica_id  # [0, 1] and [10, 11]
        ...     return repl.all_to_all(x, split_axis=0, concat_axis=0)
        >>> for x in repl.run(step_fn): print(x)
        tf.Tensor([ 0 10], shape=(2,), dtype=int32)
        tf.Tensor([ 1 11], shape=(2,), dtype=int32)

    Args:
        value: A nest of tensors of any dtype. Dtypes and shapes are the same on all
            replicas, but with `splits` the sizes along both axes may differ.
        split_axis: The axis to split, counted from the end if negative.
        concat_axis: The axis along which to concatenate, counted in the same way.
        splits: None for slices of equal size; else a list of ints, or an integer tensor
            [len(group)], with the sizes along `split_axis` of the slices that this
            replica sends. Sizes may be zero, and replicas may split differently.
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be a member.

    Returns:
        A nest like `value`, on this replica's device: for the n-th replica of the
        group, the n-th slices of all replicas, concatenated in replica order. With
        `splits`, the size along `concat_axis` is statically unknown.

    Raises:
        ArgumentError: An axis does not exist, its size does not fit the split, or a
            leaf is not a dense tensor.
        ContextError: Called outside a step.
        tf.errors.InvalidArgumentError: When the step runs: a statically unknown size
            does not fit the split, or slices to be concatenated differ in shape.
    """
    members = groups.members("all_to_all", group)
    axes.check("all_to_all", split_axis, "split_axis")
    axes.check("all_to_all", concat_axis, "concat_axis")
    leaves = base.flatten(value, "all_to_all")
    rooted.check_dense("all_to_all", leaves, "cut up")
    sizes = None if splits is None else _as_sizes(splits, len(members))
    for leaf in leaves:
        _check(leaf, split_axis, concat_axis, sizes, len(members))
    if not leaves:
        return value
    sizes_per_leaf = None if sizes is None else [sizes] * len(leaves)
    received = exchange(leaves, split_axis, concat_axis, sizes_per_leaf, group=members)
    return tf.nest.pack_sequence_as(value, received)


def exchange(
    tensors: Sequence[tf.Tensor],
    split_axis: int,
    concat_axis: int,
    sizes: Sequence[tf.Tensor] | None,
    of: Call | None = None,
    group: tuple[int, ...] | None = None,
) -> list[tf.Tensor]:
    """Puts one all_to_all call for several tensors into the graph.

    Args:
        tensors: At least one dense tensor.
        split_axis: As for `all_to_all`.
        concat_axis: As for `all_to_all`.
        sizes: None for slices of one size, else int32 [len(group)] for each tensor.
        of: Inside a gradient: the call being differentiated.
        group: The participating replicas; required except inside a gradient.

    Returns:
        The received slices, concatenated.
    """
    if group is None:
        assert of is not None, "a call says who takes part, or whose gradient it is"
        group = of.group
    values, count = rooted.values(tensors), len(group)
    options = {"split_axis": split_axis, "concat_axis": concat_axis}
    if sizes is None:
        results = [_even(value, split_axis, concat_axis, count) for value in values]
        return base.communicate(
            "all_to_all", options, tensors, results, of=of, group=group
        )
    index = group.index(context.require("all_to_all").replica_id)
    static_sizes = [
        None if context.will_be_copied() else tf.get_static_value(own_sizes)
        for own_sizes in sizes
    ]
    results = [
        _uneven(value, split_axis, concat_axis, own_sizes, index)
        for value, own_sizes in zip(values, static_sizes, strict=True)
    ]
    agreed = [_uneven(value, split_axis, concat_axis, None, index) for value in values]
    # The sizes received from each replica are results too: the gradient's splits.
    received_sizes = [Value("int32", (count,))] * len(tensors)
    received = base.communicate(
        "all_to_all",
        {**options, "splits": "given"},
        [*tensors, *sizes],
        [*results, *received_sizes],
        agreed,
        of,
        group,
    )
    return received[: len(tensors)]


def _as_sizes(splits: Any, count: int) -> tf.Tensor:
    """Returns the sizes of the slices as an int32 tensor [count]."""
    try:
        sizes = tf.convert_to_tensor(splits)
    except (TypeError, ValueError):
        sizes = None
    static_sizes = None if sizes is None else tf.get_static_value(sizes)
    fix = (
        f"splits are {count} integers, one for each replica that takes part, none "
        "below zero."
    )
    if (
        sizes is None
        or not sizes.dtype.is_integer
        or not sizes.shape.is_compatible_with([count])
        or (static_sizes is not None and (static_sizes < 0).any())
    ):
        problem = f"was given splits={errors.repr_of(splits)}"
        raise base.bad_argument("all_to_all", problem, fix)
    if static_sizes is not None:
        return tf.constant(static_sizes, tf.int32)
    sizes = unknown_shapes.of_shape("all_to_all", sizes, [count], "splits", fix)
    return tf.cast(sizes, tf.int32)


def _check(
    leaf: tf.Tensor,
    split_axis: int,
    concat_axis: int,
    sizes: tf.Tensor | None,
    count: int,
) -> None:
    """Raises ArgumentError unless the leaf can be split and concatenated as asked."""
    value = Value.of(leaf)
    where = axes.position("all_to_all", split_axis, value, "split_axis")
    axes.position("all_to_all", concat_axis, value, "concat_axis")
    size = None if value.shape is None else value.shape[where]
    if size is None:
        return
    if sizes is None:
        if size % count:
            raise base.bad_argument(
                "all_to_all",
                f"cannot cut {value} into {count} slices of one size along "
                f"split_axis={split_axis}",
                "make the size a multiple of the number of replicas, or say with "
                "splits=[...] how much each one is sent.",
            )
        return
    static_sizes = tf.get_static_value(sizes)
    if static_sizes is not None and static_sizes.sum() != size:
        raise base.bad_argument(
            "all_to_all",
            f"was given splits={static_sizes.tolist()} for {value}",
            f"the splits add up to {size}, the size along split_axis={split_axis}.",
        )


def _even(value: Value, split_axis: int, concat_axis: int, count: int) -> Value:
    """Returns dtype and shape after an exchange of equal slices."""
    if value.shape is None:
        return value
    shape = list(value.shape)
    size = shape[split_axis]
    shape[split_axis] = None if size is None else size // count
    size = shape[concat_axis]
    shape[concat_axis] = None if size is None else size * count
    return Value(value.dtype, tuple(shape))


def _uneven(
    value: Value, split_axis: int, concat_axis: int, sizes: Any, index: int
) -> Value:
    """Returns dtype and shape after an exchange of slices of different sizes.

    All slices that a replica concatenates have the same sizes along the other axes:
    those of the slice that it sends to itself.
    """
    if value.shape is None:
        return value
    shape = list(value.shape)
    shape[split_axis] = None if sizes is None else int(sizes[index])
    shape[concat_axis] = None
    return Value(value.dtype, tuple(shape))


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Sends each slice of the gradients back to the slice's source."""
    call, operands = placed.call, placed.operands
    is_uneven = "splits" in call.options
    count = len(placed.results) // (2 if is_uneven else 1)
    flowing = flows.places(upstream[:count])
    if not flowing:
        return [None] * len(operands)
    gradients = exchange(
        [upstream[k] for k in flowing],
        split_axis=call.options["concat_axis"],
        concat_axis=call.options["split_axis"],
        sizes=[placed.results[count + k] for k in flowing] if is_uneven else None,
        of=call,
    )
    gradients = [
        arithmetic.ensure_shape(d, operands[k].shape)
        for k, d in zip(flowing, gradients, strict=True)
    ]
    return flows.spread(gradients, flowing, len(operands))


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Splits on the sender and concatenates on the receiver, in replica order.

    Moves (replicas - 1) / replicas * bytes(value) per replica.
    """
    options, replicas = matched.options, range(len(matched.operands))
    is_uneven = "splits" in options
    count = len(matched.operands[0]) // (2 if is_uneven else 1)
    matched = _checked(matched, count, is_uneven)
    results: list[list[tf.Tensor]] = [[] for _ in replicas]
    received_sizes: list[list[tf.Tensor]] = [[] for _ in replicas]
    for k in range(count):
        pieces = []
        for operands, device in zip(matched.operands, matched.devices, strict=True):
            with tf.device(device):
                pieces.append(
                    axes.split(
                        operands[k],
                        operands[count + k] if is_uneven else None,
                        options["split_axis"],
                        len(replicas),
                    )
                )
        for n in replicas:
            with tf.device(matched.devices[n]):
                column = [slices[n] for slices in pieces]
                axis = options["concat_axis"]
                if is_uneven:
                    received_sizes[n].append(
                        tf.stack([tf.shape(x)[axis] for x in column])
                    )
                _check_joinable(matched, n, column)
                results[n].append(tf.concat(column, axis))
    return [[*row, *sizes] for row, sizes in zip(results, received_sizes, strict=True)]


def _checked(matched: Matched, count: int, is_uneven: bool) -> Matched:
    """Returns the communication with operands that wait for run-time checks."""
    columns = [matched.column(k) for k in range(len(matched.operands[0]))]
    for k in range(count):
        splits = columns[count + k] if is_uneven else []
        is_static = [tf.get_static_value(sizes) is not None for sizes in splits]
        all_known = all(map(unknown_shapes.is_known, columns[k])) and all(is_static)
        # A gradient's slices have the sizes in which they were received.
        if not all_known and not (is_uneven and matched.calls[0].backward):
            columns[k] = _check_shapes(matched, columns[k], splits)
    return matched.passing(list(zip(*columns, strict=True)))


def _check_shapes(
    matched: Matched, column: Sequence[tf.Tensor], splits: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns tensors that wait for run-time checks of their shapes and splits.

    Args:
        matched: The communication.
        column: One tensor per participant.
        splits: Each participant's splits; empty for slices of one size.
    """
    cut, join = (matched.options[name] for name in ("split_axis", "concat_axis"))
    count = len(column)

    def conditions(vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        sizes = [unknown_shapes.size_along(shape, cut) for shape in vectors]
        checks = [unknown_shapes.has_axis(vectors[0], axis) for axis in (cut, join)]
        if not splits:
            return [
                *unknown_shapes.equal(vectors),
                tf.equal(sizes[0] % count, 0),
                *checks,
            ]
        for split, size in zip(splits, sizes, strict=True):
            checks += [
                tf.equal(tf.reduce_sum(split), size),
                tf.reduce_all(split >= 0),
            ]
        rank = tf.size(vectors[0])
        along_one = tf.equal((cut - join) % tf.maximum(rank, 1), 0)
        checks += [along_one | same for same in unknown_shapes.equal(splits)]
        rest = [
            unknown_shapes.without(unknown_shapes.without(shape, cut), join)
            for shape in vectors
        ]
        return [*checks, *unknown_shapes.equal(rest)]

    if splits:
        problem = "the tensors of the replicas do not fit one another, or their splits"
        fix = (
            "let splits add up to the size along split_axis, and make the sizes along "
            "all other axes but concat_axis equal, and the splits too if the two "
            "differ."
        )
    else:
        problem = (
            "the tensors of the replicas differ in shape, or cannot be cut into "
            f"{count} slices of one size along split_axis={cut}"
        )
        fix = (
            f"pass tensors of one shape whose size there is a multiple of {count}, or "
            "say with splits=[...] how much each replica is sent."
        )
    return unknown_shapes.check(matched, column, conditions, problem, fix, extra=splits)


def _check_joinable(matched: Matched, n: int, column: Sequence[tf.Tensor]) -> None:
    """Raises MismatchError if the slices are known not to fit together."""
    axis = matched.options["concat_axis"]
    first = None
    for piece, call in zip(column, matched.calls, strict=True):
        if piece.shape.rank is None:
            continue
        sizes = piece.shape.as_list()
        sizes[axis] = None
        if first is None:
            first, expected = call, tf.TensorShape(sizes)
        elif not expected.is_compatible_with(sizes):
            raise errors.MismatchError(
                f"all_to_all sends replica {matched.group[n]} slices that cannot be "
                f"joined along concat_axis={axis}: {expected} and {sizes}.",
                [first.site(), call.site()],
                "let all replicas send a replica equally much along split_axis, or "
                "split and join along the same axis.",
            )
