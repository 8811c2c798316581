# SPDX-License-Identifier: Apache-2.0
"""How replicas hold the tensors of a program that was written for one device.

Each op of the program becomes one op per replica, so each tensor has one copy per
replica. Its form says how the copies make up the value of one device:

    Replicated()               each copy is the value
    Sharded(axis, layout)      the copies, concatenated along the axis, are the value
    Partial("sum")             the sum of the copies is the value; or "max", "min", ...
    Unset()                    an empty list, which takes its first element's form
    Own(layout, op)            statistics of each replica's rows, in place of the value

The invariant, of every tensor: its copies, joined as the form says, are exactly the
value of one device. After GSPMD (Xu et al. 2021, arXiv:2105.04663) and PyTorch's
DTensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Each replica holds the value of one device."""


@dataclasses.dataclass(frozen=True)
class Unset:
    """A list without elements, which may be of any form."""


@dataclasses.dataclass(frozen=True)
class Partial:
    """The copies, combined element by element, are the value of one device.

    Attributes:
        how: "sum", "max", "min", "any" or "all".
    """

    how: str = "sum"


class Layout:
    """How many rows each replica has: known when the step runs, compared by identity.

    Attributes:
        name: For plans and messages.
        depth: In how many bodies of conditionals and loops it was made. It means
            nothing outside of these.
        rows: How many rows all have in the call that it was made for, None if that is
            unknown. Others may have more: it only says what is likely to cost less.
    """

    def __init__(self, name: str, depth: int = 0, rows: int | None = None) -> None:
        self.name, self.depth, self.rows = name, depth, rows

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Sharded:
    """The copies, concatenated along an axis, are the value of one device.

    The axis consists of `outer` blocks, one behind the other, each of which is divided
    among the replicas like the rows of `layout`, with `inner` elements per row:

        a batch                              outer 1, inner 1
        concat([real, fake], 0), tile        outer 2
        reshape([n, 4], [-1]), repeat        inner 4
        reshape([time, n, 8], [-1, 8])       outer None: known only when the step runs

    Attributes:
        axis: The axis, not negative.
        layout: How many rows each replica has.
        outer: The number of blocks, or None. At most one of the two is None.
        inner: The number of elements per row, or None.
    """

    axis: int
    layout: Layout
    outer: int | None = 1
    inner: int | None = 1

    def at(self, axis: int) -> Sharded:
        """Returns the form of what has its sharded axis elsewhere."""
        return dataclasses.replace(self, axis=axis)

    @property
    def factor(self) -> int | None:
        """How many elements of the axis there are per row of the layout."""
        if self.outer is None or self.inner is None:
            return None
        return self.outer * self.inner

    def divides_like(self, other: Form) -> bool:
        """Whether copies of both have the same part of an axis of the same length."""
        if not isinstance(other, Sharded) or self.layout is not other.layout:
            return False
        same_outer = self.outer is not None and self.outer == other.outer
        return same_outer or (self.inner is not None and self.inner == other.inner)


@dataclasses.dataclass(frozen=True)
class Own:
    """Each copy is a statistic of the replica's own rows, in place of the value.

    Where one value is needed, it is the mean over the replicas, weighted by their rows.

    Attributes:
        layout: How many rows each replica has.
        of: Says which statistics they are computed from.
    """

    layout: Layout
    of: Any


Form = Replicated | Sharded | Partial | Unset | Own
REPLICATED, UNSET = Replicated(), Unset()


def equal(a: Form, b: Form) -> bool:
    """Whether a copy of form a is a copy of form b."""
    if isinstance(a, Sharded) and isinstance(b, Sharded):
        return a.divides_like(b) and a.axis == b.axis
    return a == b


@dataclasses.dataclass(frozen=True, eq=False)
class Fact:
    """What is known of a tensor before anything is built.

    Attributes:
        form: How the replicas hold it.
        numbers: Of a small tensor of integers: its elements (sizes.py).
        rows: The tensor has numbers of rows of this layout. There is then, besides the
            tensor, its local version, which counts the rows of each replica from 0.
        columns: If row numbers are the first of so many columns of the last axis, as
            tf.where makes them: how many; 0: all elements are row numbers.
        branches: Of a value that a conditional returns for its gradient: what is known
            of it per branch. Only the same branch of the gradient reads it.
    """

    form: Form = REPLICATED
    numbers: Any = None
    rows: Layout | None = None
    columns: int = 0
    branches: tuple[Fact, ...] = ()


def common(a: Form, b: Form) -> Form | None:
    """Returns the form of tensors of both forms, whose lengths may differ, or None.

    What one op takes together is equally long. What comes by turns need not be: of
    blocks as of one batch and of two, it is known that each row has one element.
    """
    if isinstance(a, Unset):
        return b
    if isinstance(b, Unset) or a == b:
        return a
    if not isinstance(a, Sharded) or not isinstance(b, Sharded) or not equal(a, b):
        return None
    outer = a.outer if a.outer == b.outer else None
    return Sharded(a.axis, a.layout, outer, a.inner if a.inner == b.inner else None)


def joined(a: Form, b: Form, is_list: bool = False) -> Form:
    """Returns the form of a tensor that comes in either form, by turns.

    Args:
        a: A form.
        b: Another.
        is_list: Whether the tensor is a list, which is not cut into parts.
    """
    both = common(a, b)
    if both is not None:
        return both
    if isinstance(b, Replicated):
        a, b = b, a
    is_cut = is_list and isinstance(b, Sharded)
    if isinstance(a, Replicated) and not is_cut:
        return b  # which costs no communication
    return REPLICATED
