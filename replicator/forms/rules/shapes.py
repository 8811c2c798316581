# SPDX-License-Identifier: Apache-2.0
"""Rules of ops that give elements other axes: where the sharded axis is then.

Ops that take or put together parts of axes are in slices.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator.forms.forms import REPLICATED, Fact, Sharded
from replicator.forms.rule import (
    LOCAL,
    Build,
    OpPlan,
    of_rows,
    of_sums,
    passed_on,
    plan,
    rule,
    stamped,
)
from replicator.forms.sizes import (
    INTEGERS,
    UNKNOWN,
    WHOLE,
    Size,
    Summed,
    are_same,
    array,
    axes_of,
    elements,
    fitting,
    ints,
    is_size,
    product,
)
from replicator.graph.ir import shapes


def of_sizes(sizes: Sequence[Any] | None) -> Sharded | None:
    """Returns the form of something made with a shape, of equal rows: zeros([n, 4]).

    Args:
        sizes: The elements of the shape.
    """
    found = [k for k, one in enumerate(sizes or ()) if is_size(one)]
    if len(found) != 1 or WHOLE in (sizes or ()):
        return None
    size: Size = (sizes or ())[found[0]]
    if size.outer and size.factor:
        return Sharded(found[0], size.layout, size.outer, size.factor // size.outer)
    return Sharded(found[0], size.layout, size.factor, 1)


@rule("Reshape")
def reshape(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The order of elements says where the rows are in the new shape."""
    form, source = facts[0].form, op.inputs[0]
    sizes = elements(op.inputs[1], facts[1])
    if not isinstance(form, Sharded):
        return of_sums(op, facts)
    if sizes is not None and isinstance(summed := facts[0].numbers, Summed):
        if are_same(summed.sizes, sizes):
            return passed_on(op, Fact(form))
        # A gradient was summed along axes that broadcasting added: its first ones.
        rest = form.at(form.axis - (summed.axes - len(sizes)))
        need = fitting(sizes, rest)
        return plan(op, [form, need], rest) if need is not None else None
    if source.shape.rank is None or sizes is None:
        return None
    if op.outputs[0].shape.rank is not None:
        pairs = zip(sizes, shapes.sizes(op.outputs[0]), strict=True)
        sizes = [k if s is UNKNOWN and k is not None else s for s, k in pairs]
    made = _followed(form, source.shape.as_list(), sizes)
    if made is None or WHOLE in sizes:
        return None
    if sizes[made.axis] == -1:
        if any(map(is_size, sizes)):
            return None  # the sizes in front may be of the rows
        return plan(op, [form], made)
    if fitting(sizes, made) is LOCAL:
        build = _with_inferred_size(form, made, sizes) if -1 in sizes else None
        return plan(op, [form, LOCAL], made, build=build)
    return None


def _with_inferred_size(form: Sharded, made: Sharded, sizes: Sequence[Any]) -> Build:
    """Builds a reshape to [rows, -1], which infers nothing from a replica of 0 rows."""

    def build(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[tf.Tensor]:
        x, shape = inputs
        before, behind = form.factor, made.factor
        if before is None or behind is None:  # all rows say it
            before = tf.cast(replica.length(form, x), shape.dtype)
            behind = replica.whole_sizes(array(sizes), shape)[made.axis]
        source = tf.shape(x, shape.dtype)
        count = tf.reduce_prod(_without(source, form.axis)) * before
        others = -tf.reduce_prod(_without(shape, made.axis)) * behind
        return [tf.reshape(x, tf.where(tf.equal(shape, -1), count // others, shape))]

    return build


def _without(shape: tf.Tensor, axis: int) -> tf.Tensor:
    return tf.concat([shape[:axis], shape[axis + 1 :]], 0)


def _followed(
    form: Sharded, source: Sequence[Any], target: Sequence[Any]
) -> Sharded | None:
    """Returns the form of a sharded tensor that is reshaped, or None.

    In the order of the elements, the rows of the layout have so many before them, and
    so many behind them. One of these must be known, and tell where they are now.
    """
    outer = product([*source[: form.axis], form.outer])
    inner = product([*source[form.axis + 1 :], form.inner])
    places = [
        k for k, one in enumerate(target) if is_size(one) and one.layout is form.layout
    ]
    places = places or [k for k, one in enumerate(target) if one == -1]
    if len(places) != 1:
        return None
    at = places[0]
    blocks = _multiple(outer, product(target[:at]))
    each = _multiple(inner, product(target[at + 1 :]))
    if blocks == 0 or each == 0 or (blocks is None and each is None):
        return None
    factor = target[at].factor if is_size(target[at]) else None
    if factor:
        blocks, each = blocks or factor // (each or 1), each or factor // (blocks or 1)
        if blocks * each != factor:
            return None
    if blocks is None and product(target[:at]) != 1:
        return None  # a block may be several, or these of other rows
    is_inferred = not is_size(target[at])
    if each is None and (blocks != 1 or (is_inferred and inner is not None)):
        return None  # several blocks, or rows of a known length, may be one
    return Sharded(at, form.layout, blocks, each)


def _multiple(elements_now: int | None, then: int | None) -> int | None:
    """Returns how many times as many there are; None: unknown; 0: it does not fit."""
    if elements_now is None or then is None:
        return None
    if then == 0:
        return 1
    return elements_now // then if elements_now % then == 0 else 0


@of_rows("Transpose")
def transpose(op: tf.Operation, form: Sharded, facts: list[Fact]) -> OpPlan | None:
    """Permutes axes."""
    order = axes_of(op, facts[1])
    return plan(op, [form], form.at(order.index(form.axis))) if order else None


@of_rows("ExpandDims")
def expand_dims(op: tf.Operation, form: Sharded, facts: list[Fact]) -> OpPlan | None:
    """Adds an axis of size 1."""
    axis = ints(facts[1])
    if axis is None:
        return None
    at = axis[0] % (op.inputs[0].shape.rank + 1)
    return plan(op, [form], form.at(form.axis + (at <= form.axis)))


@of_rows("Squeeze")
def squeeze(op: tf.Operation, form: Sharded, facts: list[Fact]) -> OpPlan | None:
    """Removes axes that it names; without names, it would remove that of one row."""
    axes = {axis % op.inputs[0].shape.rank for axis in op.get_attr("squeeze_dims")}
    if not axes or form.axis in axes:
        return None
    return plan(op, [form], form.at(form.axis - sum(a < form.axis for a in axes)))


@rule("Tile")
def tile(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Repeats a tensor: a batch becomes blocks of one, and one row becomes a batch."""
    form, times = facts[0].form, elements(op.inputs[1], facts[1])
    if times is None:
        return None
    if isinstance(form, Sharded):
        if any(map(is_size, times)) or WHOLE in times:
            return None
        more = times[form.axis]
        blocks = form.outer * more if form.outer and isinstance(more, int) else None
        if blocks == 0 or (blocks is None and form.inner != 1):
            return None
        return plan(op, [form], Sharded(form.axis, form.layout, blocks, form.inner))
    known = shapes.static(op.inputs[0])
    sizes = [
        WHOLE if is_size(size) and (known is None or known[k] != 1) else size
        for k, size in enumerate(times)
    ]
    whole = of_sizes(sizes)
    return plan(op, [REPLICATED, LOCAL], whole) if whole else of_sums(op, facts)


@rule("Fill")
def fill(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Makes a tensor of one value, with the shape of something sharded."""
    made = of_sizes(elements(op.inputs[0], facts[0]))
    return plan(op, [LOCAL], made) if made else None


@rule("BroadcastTo")
def broadcast_to(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Broadcasts rows to other axes, or what has no rows to rows."""
    form, source = facts[0].form, op.inputs[0].shape
    sizes = elements(op.inputs[1], facts[1])
    if sizes is None or source.rank is None:
        return None
    if isinstance(form, Sharded):
        made = form.at(form.axis + len(sizes) - source.rank)
        is_local = fitting(sizes, made) is LOCAL
        if not is_local or sizes[made.axis].factor != form.factor:
            return None
        return plan(op, [form, LOCAL], made)
    whole = of_sizes(sizes)
    if whole is None:
        return None
    axis = whole.axis - (len(sizes) - source.rank)
    has_axis = axis >= 0 and source.as_list()[axis] != 1
    return plan(op, [whole.at(axis) if has_axis else REPLICATED, LOCAL], whole)


@rule("Range")
def range_(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """All numbers of rows, range(n); locally, those of each replica from 0."""
    limit = facts[1].numbers
    size = limit.item() if isinstance(limit, np.ndarray) else None
    is_all = ints(facts[0]) == [0] and ints(facts[2]) == [1]
    if not is_all or not isinstance(size, Size) or size.factor != 1:
        return None
    if op.outputs[0].dtype not in INTEGERS:
        return None
    layout = size.layout

    def build(replica: Any, op: tf.Operation, inputs: Any, local: Any) -> Any:
        (own,) = local
        return [own + tf.cast(replica.offset(layout), own.dtype)]

    makes = [Fact(Sharded(0, layout), rows=layout)]
    needs = REPLICATED, LOCAL
    return plan(op, needs, makes, build=build, build_local=stamped)
