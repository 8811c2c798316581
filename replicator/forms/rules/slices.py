# SPDX-License-Identifier: Apache-2.0
"""Rules of ops that take parts of axes, and of those that put parts together.

Along other axes than the sharded one, each replica does so with its rows. Along the
sharded one, whole blocks are taken or put together (forms.Sharded).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.forms.evaluation import index
from replicator.forms.forms import REPLICATED, Fact, Sharded, equal
from replicator.forms.rule import (
    LOCAL,
    Need,
    OpPlan,
    is_partial,
    of_rows,
    of_sums,
    plan,
    rule,
)
from replicator.forms.rules.shapes import of_sizes
from replicator.forms.sizes import WHOLE, elements, fitting, ints, is_size


def _first_sharded(facts: Sequence[Fact]) -> Sharded | None:
    return next((f.form for f in facts if isinstance(f.form, Sharded)), None)


@rule("Pack")
def pack(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Stacks tensors along a new axis."""
    form, rank = _first_sharded(facts), op.inputs[0].shape.rank
    if form is None:
        return of_sums(op, facts, range(len(facts)))
    if rank is None:
        return None
    at = op.get_attr("axis") % (rank + 1)
    made = form.at(form.axis + (at <= form.axis))
    return plan(op, [form] * len(facts), made)


@of_rows("Unpack")
def unpack(op: tf.Operation, form: Sharded, facts: list[Fact]) -> OpPlan | None:
    """Takes a tensor apart along an axis."""
    axis = op.get_attr("axis") % op.inputs[0].shape.rank
    if axis == form.axis:
        return None
    return plan(op, [form], form.at(form.axis - (axis < form.axis)))


@rule("ConcatV2")
def concat(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Puts batches one behind the other, which become blocks of one axis."""
    *values, axis = facts
    form, at, rank = _first_sharded(values), ints(axis), op.inputs[0].shape.rank
    if form is None:
        return of_sums(op, facts, range(len(values)))
    if at is None or rank is None:
        return None
    if at[0] % rank != form.axis:
        return plan(op, [form] * len(values), form)
    if form.outer is None or form.inner is None or any(f.form != form for f in values):
        return None  # blocks are equally long
    made = Sharded(form.axis, form.layout, form.outer * len(values), form.inner)
    return plan(op, [form] * len(values), made)


@rule("Split SplitV")
def split(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Takes an axis apart. Split takes (axis, value), SplitV (value, sizes, axis)."""
    at, axis = (1, facts[0]) if op.type == "Split" else (0, facts[2])
    form, where, rank = facts[at].form, ints(axis), op.inputs[at].shape.rank
    needs: list[Need] = [REPLICATED] * len(facts)
    needs[at] = form
    if is_partial(facts[at]):
        return plan(op, needs, form)
    if not isinstance(form, Sharded) or where is None or rank is None:
        return None
    if where[0] % rank != form.axis:
        return plan(op, needs, form)
    count = op.get_attr("num_split")
    if op.type == "SplitV" or not form.outer or form.outer % count:
        return None
    made = Sharded(form.axis, form.layout, form.outer // count, form.inner)
    return plan(op, needs, made)


@of_rows("Slice")
def slice_(op: tf.Operation, form: Sharded, facts: list[Fact]) -> OpPlan | None:
    """Takes a part, by begin and size."""
    begin, size = (elements(op.inputs[k], facts[k]) for k in (1, 2))
    if begin is None or size is None:
        return None
    first, length = begin[form.axis], size[form.axis]
    made = _part(form, first, None if length == -1 else first + length)
    needs = _limits((begin, size), form, form.axis)
    if made is None or needs is None:
        return None
    return plan(op, [form, *needs], made)


def _part(form: Sharded, begin: Any, end: Any) -> Sharded | None:
    """Returns the form of a part of the sharded axis: all of it, or some blocks.

    Args:
        form: Of the whole.
        begin: Where it begins, an element (sizes.py); None: at the beginning.
        end: Where it ends; None: at the end.
    """
    first = _blocks(form, 0 if begin is None else begin)
    last = form.outer if end is None else _blocks(form, end)
    if first == 0 and (end is None or (last is not None and last == form.outer)):
        return form
    if first is None or last is None or not 0 <= first < last <= (form.outer or 0):
        return None
    return Sharded(form.axis, form.layout, last - first, form.inner)


def _blocks(form: Sharded, size: Any) -> int | None:
    """Returns how many blocks of the sharded axis have this size, or None."""
    if isinstance(size, int):
        return 0 if size == 0 else None
    ours = is_size(size) and size.layout is form.layout and size.factor and form.inner
    if not ours or size.factor % form.inner:
        return None
    return size.factor // form.inner


@of_rows("StridedSlice")
def strided_slice(op: tf.Operation, form: Sharded, facts: list[Fact]) -> OpPlan | None:
    """x[1:, 0] and the like."""
    found = _selected(op, facts, form, op.inputs[0].shape.rank)
    return found and plan(op, [form, *found[1]], found[0])


@rule("StridedSliceGrad")
def strided_slice_grad(op: tf.Operation, facts: list[Fact], scope: Any) -> Any:
    """Puts a gradient into zeros of the shape that was sliced, its first input."""
    form, sizes = facts[4].form, elements(op.inputs[0], facts[0])
    whole = of_sizes(sizes)
    if not isinstance(form, Sharded) or whole is None:
        return of_sums(op, facts, (4,))
    found = _selected(op, facts, whole, len(sizes or ()))
    if found is None or not equal(found[0], form):
        return None
    return plan(op, [LOCAL, *found[1], form], whole)


def _selected(
    op: tf.Operation, facts: Sequence[Fact], form: Sharded, rank: int
) -> tuple[Sharded, list[Need]] | None:
    """Returns the form of what a strided slice selects, and which limits it needs.

    Args:
        op: The slice, or its gradient.
        facts: What is known of its inputs.
        form: Of what is sliced.
        rank: Its rank.
    """
    found = [elements(t, f) for t, f in zip(op.inputs[1:4], facts[1:4], strict=True)]
    parts = [one for one in found if one is not None]
    if len(parts) < len(found):
        return None
    chosen, result, k = _place(index(op, *parts), form.axis, rank)
    if not isinstance(chosen, slice) or chosen.step != 1:
        return None
    made, needs = _part(form, chosen.start, chosen.stop), _limits(parts, form, k)
    return (made.at(result), needs) if made and needs else None


def _limits(
    parts: Sequence[list[Any]], form: Sharded, k: int | None
) -> list[Need] | None:
    """Returns which versions of begin, end and strides to take.

    Args:
        parts: Their elements.
        form: Of what is sliced.
        k: Which element is of the sharded axis; None: none is.

    Returns:
        What is needed of each. Numbers of rows along other axes are those of all.
    """
    needs: list[Any] = [
        fitting(one, form.at(k)) if k is not None and is_size(one[k]) else REPLICATED
        for one in parts
    ]
    return None if None in needs else needs


def _place(where: Sequence[Any], axis: int, rank: int) -> tuple[Any, int, int | None]:
    """Returns what is selected of an axis, which axis that becomes, and who says so.

    Args:
        where: What is selected, as NumPy writes it.
        axis: The axis of what is sliced.
        rank: The rank of that.
    """
    items: list[tuple[int | None, Any]] = list(enumerate(where))
    others = rank - sum(one is not None and one is not ... for one in where)
    at = where.index(...) if ... in where else len(where)
    items[at : at + 1] = [(None, slice(None, None, 1))] * others
    n = [n for n, (_, one) in enumerate(items) if one is not None][axis]
    made = sum(one is None or isinstance(one, slice) for _, one in items[:n])
    k, chosen = items[n]
    return chosen, made, k


@of_rows("Pad MirrorPad MirrorPadGrad")
@of_rows("PadV2", linear=False)
def pad(op: tf.Operation, form: Sharded, facts: list[Fact]) -> OpPlan | None:
    """Pads other axes than the sharded one."""
    widths = elements(op.inputs[1], facts[1])
    if widths is None or widths[2 * form.axis : 2 * form.axis + 2] != [0, 0]:
        return None
    if WHOLE in widths or any(map(is_size, widths)):
        return None
    return plan(op, [form], form)
