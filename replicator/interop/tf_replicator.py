# SPDX-License-Identifier: Apache-2.0
"""What TF-Replicator offers beyond its primitives, built from them.

all_sum, all_min and all_max are reductions by name; map_reduce and map_gather divide
work among the replicas and give all of them the results.

Source: the primitives of TF-Replicator (Buchlovsky et al. 2019, arXiv:1902.00465).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import arguments, context, errors
from replicator._tf import autograph
from replicator.interop import mapped
from replicator.primitives import (
    all_gather,
    all_reduce,
    arithmetic,
    base,
    groups,
    reductions,
    rooted,
)

Function = Callable[..., Any]

_MAPPED = ("sum", "mean", "min", "max", "prod")


def all_sum(value: Any, group: Any = None) -> Any:
    """Gives every replica the sum over all replicas: `all_reduce(value, "sum")`.

    Example:
        >>> for x in repl.run(lambda: repl.all_sum(repl.replica_id + 1.0)): print(x)
        tf.Tensor(3.0, shape=(), dtype=float32)
        tf.Tensor(3.0, shape=(), dtype=float32)

    Args:
        value: A nest of tensors of numbers, alike in dtype and shape on all replicas.
        group: The replicas that take part, by `Replicator.group` or `groups`; all by
            default. The calling replica is one of them.

    Returns:
        A nest like `value`, the same bits on every replica, on this replica's device.

    Raises:
        ArgumentError: A leaf is not a tensor of such a dtype.
        ContextError: Called outside a step.
    """
    return all_reduce.all_reduce(value, "sum", group=group)


def all_min(value: Any, group: Any = None) -> Any:
    """Gives every replica the minimum over all replicas: `all_reduce(value, "min")`.

    Example:
        >>> for x in repl.run(lambda: repl.all_min(repl.replica_id + 1.0)): print(x)
        tf.Tensor(1.0, shape=(), dtype=float32)
        tf.Tensor(1.0, shape=(), dtype=float32)

    Args:
        value: A nest of tensors of floating numbers, integers or booleans, alike in
            dtype and shape on all replicas.
        group: The replicas that take part, by `Replicator.group` or `groups`; all by
            default. The calling replica is one of them.

    Returns:
        A nest like `value`, the same bits on every replica, on this replica's device.

    Raises:
        ArgumentError: A leaf is not a tensor of such a dtype.
        ContextError: Called outside a step.
    """
    return all_reduce.all_reduce(value, "min", group=group)


def all_max(value: Any, group: Any = None) -> Any:
    """Gives every replica the maximum over all replicas: `all_reduce(value, "max")`.

    Example:
        >>> for x in repl.run(lambda: repl.all_max(repl.replica_id + 1.0)): print(x)
        tf.Tensor(2.0, shape=(), dtype=float32)
        tf.Tensor(2.0, shape=(), dtype=float32)

    Args:
        value: A nest of tensors of floating numbers, integers or booleans, alike in
            dtype and shape on all replicas.
        group: The replicas that take part, by `Replicator.group` or `groups`; all by
            default. The calling replica is one of them.

    Returns:
        A nest like `value`, the same bits on every replica, on this replica's device.

    Raises:
        ArgumentError: A leaf is not a tensor of such a dtype.
        ContextError: Called outside a step.
    """
    return all_reduce.all_reduce(value, "max", group=group)


def map_reduce(
    fn: Function, values: Sequence[Any], op: str = "sum", group: Any = None
) -> Any:
    """Maps a function over values, divided among the replicas, and reduces the results.

    Of R replicas, the one at place k % R maps the k-th value. A replica without a value
    maps the first one, and its result is ignored.

    Example:
        >>> values = [1.0, 2.0, 3.0]  # replica 0 squares 1 and 3, replica 1 squares 2
        >>> for x in repl.run(lambda: repl.map_reduce(tf.square, values)): print(x)
        tf.Tensor(14.0, shape=(), dtype=float32)
        tf.Tensor(14.0, shape=(), dtype=float32)

    Args:
        fn: Takes an entry of `values` and returns a nest of dense tensors, alike in
            dtype and shape for all entries. Must not communicate.
        values: A list or tuple of at least one entry, the same on all replicas.
        op: "sum", "mean", "min", "max" or "prod", over the entries of `values`.
        group: The replicas that take part, by `Replicator.group` or `groups`; all by
            default. The calling replica is one of them.

    Returns:
        A nest like the results of `fn`, the same bits on every replica. Each replica
        reduces its own results first, so sums are rounded differently for different
        numbers of replicas.

    Raises:
        ArgumentError: `values` is not a list or tuple, or is empty; `op` is not one of
            these or has no meaning for a dtype; or a result is sparse.
        ContextError: Called outside a step.
    """
    members = groups.members("map_reduce", group)
    base.check_place("map_reduce", errors.user_line())
    _check_values("map_reduce", values)
    if not arguments.is_choice(op, _MAPPED):
        raise base.bad_argument(
            "map_reduce",
            f"was given op={errors.repr_of(op)}",
            f"op is one of {', '.join(_MAPPED)}.",
        )
    _check_function("map_reduce", fn)
    index, count = _place("map_reduce", members)
    is_idle = index >= len(values)
    entries = values[:1] if is_idle else values[index::count]
    results = [autograph.call_converted(fn, [entry]) for entry in entries]
    flat = [_dense("map_reduce", result) for result in results]
    for leaf in flat[0]:
        reductions.check("map_reduce", leaf, op)
    mapped.check_equal_specs(results, flat)
    local = "sum" if op == "mean" else op
    reduced = []
    for column in zip(*flat, strict=True):
        tensors = mapped.of_one_shape(column)
        (partial,) = reductions.combine(local, tensors, [index] * len(tensors))
        reduced.append(mapped.neutral(partial, local) if is_idle else partial)
    if not reduced:
        return results[0]
    totals = all_reduce.reduce_dense(reduced, local, group=members)
    if op == "mean":
        totals = [arithmetic.divide(total, len(values)) for total in totals]
    return tf.nest.pack_sequence_as(results[0], totals)


def map_gather(
    fns: Function | Sequence[Function],
    values: Sequence[Any],
    group: Any = None,
) -> list[Any]:
    """Applies functions to values, divided among the replicas, and gathers the results.

    Of R replicas, the one at place k % R computes the k-th result. The others also
    build the function, to get the dtypes and shapes of its results, but in a
    conditional that is never taken: create its variables beforehand.

    Example:
        >>> values = [1.0, 2.0, 3.0]  # replica 0 squares 1 and 3, replica 1 squares 2
        >>> squares = repl.run(lambda: repl.map_gather(tf.square, values))
        >>> [float(square) for square in squares]  # the same on both replicas
        [1.0, 4.0, 9.0]

    Args:
        fns: One function for each entry of `values`, or one for all. Takes the entry
            and returns a nest of dense tensors, of any dtypes and shapes. Must not
            communicate.
        values: A list or tuple, the same on all replicas.
        group: The replicas that take part, by `Replicator.group` or `groups`; all by
            default. The calling replica is one of them.

    Returns:
        The list of all results, in the order of `values`, on every replica.

    Raises:
        ArgumentError: `values` is not a list or tuple; the numbers of functions and
            values differ; or a result is sparse.
        ContextError: Called outside a step.
    """
    members = groups.members("map_gather", group)
    base.check_place("map_gather", errors.user_line())
    _check_values("map_gather", values, empty=True)
    functions = [fns] * len(values) if callable(fns) else fns
    if not isinstance(functions, list | tuple):
        functions = []
    for fn in functions:
        _check_function("map_gather", fn)
    if len(functions) != len(values):
        number = str(len(functions))
        if not isinstance(fns, list | tuple):
            number = f"fns={errors.repr_of(fns)} as"
        raise base.bad_argument(
            "map_gather",
            f"was given {number} functions for {len(values)} values",
            "pass a list of one function for each value, or one for all.",
        )
    index, count = _place("map_gather", members)
    works = [
        (_computed if k % count == index else _computed_elsewhere)(fn, entry)
        for k, (fn, entry) in enumerate(zip(functions, values, strict=True))
    ]
    leaves = [leaf for work in works for leaf in work.leaves]
    if not leaves:
        return [work.structure for work in works]
    rows = [leaf.rows for leaf in leaves]
    sizes = [leaf.size for leaf in leaves]
    received = all_gather.gather_dense([*rows, *sizes], axis=0, group=members)
    shaped = iter(
        _reshaped(flat, size, leaf.shape)
        for flat, size, leaf in zip(
            received[: len(rows)], received[len(rows) :], leaves, strict=True
        )
    )
    return [
        tf.nest.pack_sequence_as(work.structure, [next(shaped) for _ in work.leaves])
        for work in works
    ]


def _check_values(caller: str, values: Any, empty: bool = False) -> None:
    if not isinstance(values, list | tuple) or not (values or empty):
        raise base.bad_argument(
            caller,
            f"was given values={errors.repr_of(values)}",
            f"values are a list or tuple{'' if empty else ' of at least one entry'}; "
            "tf.unstack makes a list from a tensor.",
        )


def _check_function(caller: str, fn: Any) -> None:
    """Raises ArgumentError unless a function can be called with one entry."""
    if not callable(fn) or arguments.refuses(fn, 1):
        raise base.bad_argument(
            caller,
            f"was given {errors.repr_of(fn)} as a function",
            "pass a function that takes one entry of the values.",
        )


def _place(caller: str, members: Sequence[int]) -> tuple[int, int]:
    """Returns the place of the built replica in the group, and the group's size."""
    replica = context.require(caller)
    replica.build.refuse_copies(f"which share of {caller} is the replica's own")
    return members.index(replica.replica_id), len(members)


def _dense(caller: str, result: Any) -> list[tf.Tensor]:
    """Returns the leaves of the result of the user's function."""
    leaves = base.flatten(result, caller)
    rooted.check_dense(caller, leaves, "share")
    for leaf in leaves:
        if leaf.dtype in (tf.variant, tf.resource):
            raise base.bad_argument(
                caller,
                f"cannot share {leaf.dtype.name} tensors",
                "return tensors of numbers, booleans or strings.",
            )
    return leaves


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One tensor of a result, as every replica knows it.

    Attributes:
        rows: Its values, flattened; empty if another replica does the work.
        size: Its shape as a tensor; empty if another replica does the work.
        shape: Its static shape.
    """

    rows: tf.Tensor
    size: tf.Tensor
    shape: tf.TensorShape


@dataclasses.dataclass(frozen=True)
class _Result:
    """One result: its structure and its leaves."""

    structure: Any
    leaves: list[_Leaf]


def _computed(fn: Function, entry: Any) -> _Result:
    """Computes a result on this replica."""
    structure = autograph.call_converted(fn, [entry])
    return _Result(
        structure,
        [
            _Leaf(tf.reshape(leaf, [-1]), tf.shape(leaf), leaf.shape)
            for leaf in _dense("map_gather", structure)
        ],
    )


def _computed_elsewhere(fn: Function, entry: Any) -> _Result:
    """Builds the computation of a result that another replica computes.

    It is in a conditional, through which tapes find the communication; neither its
    branch nor the branch's gradient ever runs.
    """
    results: list[_Result] = []

    def build() -> list[tf.Tensor]:
        results.append(_computed(fn, entry))
        return [leaf.rows for leaf in results[0].leaves]

    def skip() -> list[tf.Tensor]:
        # Sized as far as is known: second derivatives of a conditional take the shapes
        # of one branch for those of the other.
        return [
            tf.zeros([leaf.shape.num_elements() or 0], leaf.rows.dtype)
            for leaf in results[0].leaves
        ]

    rows = tf.nest.flatten(tf.cond(tf.constant(False), build, skip))
    no_size = tf.zeros([0], tf.int32)
    return _Result(
        results[0].structure,
        [
            _Leaf(row[:0], no_size, leaf.shape)
            for row, leaf in zip(rows, results[0].leaves, strict=True)
        ],
    )


def _reshaped(row: tf.Tensor, size: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Reshapes flat values; `size` is their shape if the static one is incomplete."""
    if shape.is_fully_defined():
        return tf.reshape(row, shape)
    return arithmetic.ensure_shape(tf.reshape(row, size), shape)
