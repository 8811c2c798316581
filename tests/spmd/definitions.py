# SPDX-License-Identifier: Apache-2.0
"""The definition of each collective, in NumPy.

`values[n]` is the operand of the group's n-th member; the result has each member's
value, None where it receives nothing. Roots, sources and destinations are positions in
the group. Nothing here uses the library.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Values = Sequence[np.ndarray]
Received = list[np.ndarray | None]


def reduced(values: Values, op: str, weight: Sequence[int] | None = None) -> np.ndarray:
    """Returns op over all members, element by element, in the dtype of the values."""
    stacked = np.stack(values)
    op = op.removeprefix("arg")
    if weight is not None:
        stacked = stacked * np.reshape(weight, [-1] + [1] * values[0].ndim)
        total = stacked.sum(0) / max(sum(weight), 1)
    elif op == "mean":
        total = stacked.sum(0) / len(values)
    elif op in ("sum", "prod", "min", "max"):
        total = getattr(np, op)(stacked, axis=0)
    else:
        total = getattr(np, op).reduce(stacked, axis=0)
    return np.asarray(total).astype(values[0].dtype)


def places(values: Values, op: str) -> np.ndarray:
    """Returns, for "argmin" and "argmax", the first member that holds each extremum."""
    return np.stack([value == reduced(values, op) for value in values]).argmax(0)


def all_reduce(
    values: Values, op: str = "sum", weight: Sequence[int] | None = None
) -> Received:
    return [reduced(values, op, weight) for _ in values]


def reduce(values: Values, root: int = 0, op: str = "sum") -> Received:
    return [reduced(values, op) if n == root else None for n in range(len(values))]


def reduce_scatter(values: Values, op: str = "sum", axis: int = 0) -> Received:
    return list(np.array_split(reduced(values, op), len(values), axis))


def broadcast(values: Values, root: int = 0) -> Received:
    return [values[root] for _ in values]


def joined(values: Values, axis: int | None) -> np.ndarray:
    return np.stack(values) if axis is None else np.concatenate(values, axis)


def all_gather(values: Values, axis: int | None = None) -> Received:
    return [joined(values, axis) for _ in values]


def gather(values: Values, root: int = 0, axis: int | None = None) -> Received:
    return [joined(values, axis) if n == root else None for n in range(len(values))]


def scatter(values: Values, root: int = 0, axis: int | None = None) -> Received:
    if axis is None:
        return list(values[root])
    return list(np.array_split(values[root], len(values), axis))


def all_to_all(
    values: Values,
    split_axis: int,
    concat_axis: int,
    splits: Sequence[Sequence[int]] | None = None,
) -> Received:
    pieces = []
    for n, value in enumerate(values):
        count = len(values)
        sizes = [value.shape[split_axis] // count] * count if not splits else splits[n]
        pieces.append(np.split(value, np.cumsum(sizes)[:-1], split_axis))
    return [
        np.concatenate([slices[n] for slices in pieces], concat_axis)
        for n in range(len(values))
    ]


def permute(values: Values, pairs: Sequence[tuple[int, int]]) -> Received:
    sources = {destination: source for source, destination in pairs}
    return [
        values[sources[n]] if n in sources else np.zeros_like(values[n])
        for n in range(len(values))
    ]


def shift(values: Values, offset: int = 1) -> Received:
    return [values[(n - offset) % len(values)] for n in range(len(values))]
