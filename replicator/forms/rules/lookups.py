# SPDX-License-Identifier: Apache-2.0
"""Rules of ops that select, add up or find rows by their numbers.

Numbers of rows of a sharded tensor, as Where and Range make them, have a local version,
by which each replica finds its own rows (`tf.boolean_mask`), and adds up gradients for
these. Any other numbers are of rows of a table: that is looked up whole, and what is
added up for its rows is a sum over the replicas, or gathered if the table is longer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import functions
from replicator.forms.forms import REPLICATED, Fact, Form, Layout, Partial, Sharded
from replicator.forms.rule import LOCAL, OpPlan, is_partial, of_sums, plan, rule
from replicator.forms.sizes import elements, fitting, ints, product
from replicator.graph.ir import shapes


def _are_own_rows(form: Form, ids: Fact, columns: int = 0) -> bool:
    """Whether row numbers are those of a tensor of this form."""
    if not isinstance(form, Sharded) or ids.columns != columns:
        return False
    return ids.rows is form.layout and form.axis == 0 and form.factor == 1


def _per_own_row(ids: Fact, size: Fact, tensor: tf.Tensor, columns: int = 0) -> bool:
    """Whether there is one result for each row of what the numbers are rows of.

    Args:
        ids: What is known of the numbers.
        size: What is known of the shape of the results.
        tensor: This shape, or their number.
        columns: In how many columns the numbers must be (forms.Fact).
    """
    sizes = elements(tensor, size)
    if ids.rows is None or ids.columns != columns or not sizes:
        return False
    is_own = fitting(sizes, Sharded(0, ids.rows)) is LOCAL
    return is_own and bool(sizes[0].factor == 1)


def _columns(ids: tf.Tensor) -> int:
    """Returns of how many numbers an index consists; 0: just one."""
    last = shapes.size(ids, -1)
    return 0 if last == 1 else last or -1


def _is_of_variable(op: tf.Operation) -> bool:
    return bool(op.inputs[0].dtype == tf.resource)


@rule("GatherV2 Gather ResourceGather")
def gather(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Selects rows of a tensor or of a variable, also along another axis."""
    values, ids = facts[0].form, facts[1]
    if is_partial(facts[0]) and (
        _is_of_variable(op) or not isinstance(ids.form, Sharded)
    ):
        return plan(op, [values], values)
    axis = ints(facts[2]) if op.type == "GatherV2" else [0]
    rank, ids_rank = op.inputs[0].shape.rank, op.inputs[1].shape.rank
    dims = op.get_attr("batch_dims") if op.type != "Gather" else 0
    if axis is None or ids_rank is None or (axis[0] < 0 and rank is None):
        return None
    if dims:  # the first axes of both are the same: replicas look up in their own rows
        form = next((f.form for f in facts[:2] if isinstance(f.form, Sharded)), None)
        is_row = form is not None and form.axis < dims and not _is_of_variable(op)
        return plan(op, [form, form], form) if form and is_row else None
    at = axis[0] if axis[0] >= 0 else axis[0] % rank
    if isinstance(ids.form, Sharded):
        made = ids.form.at(ids.form.axis + at)
        if at == 0 and _are_own_rows(values, ids):
            return plan(op, [values, LOCAL], made)
        return plan(op, [REPLICATED, ids.form], made)
    if isinstance(values, Sharded) and values.axis != at:
        made = values.at(values.axis + (ids_rank - 1 if values.axis > at else 0))
        return plan(op, [values], made)
    return None


@rule("GatherNd ResourceGatherNd")
def gather_nd(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Selects elements, or rows, by one index each."""
    values, ids = facts
    rank = op.inputs[1].shape.rank
    if is_partial(values):
        return of_sums(op, facts)
    if not isinstance(ids.form, Sharded) or rank is None or ids.form.axis == rank - 1:
        return None
    if _are_own_rows(values.form, ids, _columns(op.inputs[1])):
        return plan(op, [values.form, LOCAL], ids.form)
    return plan(op, [REPLICATED, ids.form], ids.form)


@rule("UnsortedSegmentSum UnsortedSegmentMax UnsortedSegmentMin")
def segments(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Adds up rows that have the same number, or finds the largest or smallest."""
    how = op.type[-3:].lower()
    data, ids, size = facts
    form = data.form if isinstance(data.form, Sharded) else ids.form
    rank = op.inputs[1].shape.rank
    if not isinstance(form, Sharded):
        return of_sums(op, facts) if how == "sum" else None
    if rank is None:
        return None
    if form.axis >= rank:
        return plan(op, [form], form.at(form.axis - rank + 1))
    is_own = ids.form == form and _per_own_row(ids, size, op.inputs[2])
    if how == "sum" and is_own and ids.rows is not None:
        return plan(op, [form, LOCAL, LOCAL], Sharded(0, ids.rows))
    if _is_longer(op, size, ids.form, form):
        return None  # the rows are gathered: an embedding's gradient, say
    return plan(op, [form, form], Partial(how))


def _is_longer(op: tf.Operation, count: Fact, ids: Form, form: Sharded) -> bool:
    """Whether results for segments are longer than the rows that they are made of.

    Args:
        op: Adds up rows.
        count: What is known of the number of segments.
        ids: The form of their numbers.
        form: That of the rows.
    """
    found = ints(count)
    if found is None:
        # Different row numbers, as optimizers find them when all are gathered, are as
        # many as rows, at most.
        return ids == REPLICATED and op.inputs[1].op.type.startswith("Unique")
    sizes: list[Any] = list(shapes.sizes(op.inputs[1]))
    per_row, rows = form.factor, form.layout.rows
    sizes[form.axis] = per_row * rows if per_row and rows else None
    total = product(sizes)
    return total is not None and total < found[0]


@rule("ScatterNd")
def scatter_nd(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Adds up updates, each at an index, in zeros of a shape."""
    ids, updates, shape = facts
    form, rank = updates.form, op.inputs[0].shape.rank
    if not isinstance(form, Sharded) or rank is None or form.axis >= rank - 1:
        return None
    if not op.outputs[0].dtype.is_numeric:
        return None
    is_own = _per_own_row(ids, shape, op.inputs[2], _columns(op.inputs[0]))
    if is_own and ids.form == form and ids.rows is not None:
        return plan(op, [LOCAL, form, LOCAL], Sharded(0, ids.rows))
    return plan(op, [form, form], Partial())


@rule("Where")
def where(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Finds rows: each replica its own, so that there is a new number of rows."""
    form, rank = facts[0].form, op.inputs[0].shape.rank
    if not isinstance(form, Sharded) or form.axis or form.factor != 1:
        return None
    if scope.in_branch:
        return None
    found = Layout(f"rows of {op.name}", scope.depth)

    def build_local(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> Any:
        results = replica.stamp(op, inputs)
        replica.define(found, tf.shape(results[0])[0])
        return results

    def build(replica: Any, op: tf.Operation, inputs: Any, local: Any) -> Any:
        (rows,) = local
        first = tf.one_hot(0, tf.shape(rows)[1], dtype=rows.dtype)
        return [rows + first * tf.cast(replica.offset(form.layout), rows.dtype)]

    columns = 0 if rank == 1 else rank or -1
    fact = Fact(Sharded(0, found), rows=form.layout, columns=columns)
    return OpPlan([form], [fact], build=build, build_local=build_local)


@rule("LookupTableFindV2")
def found(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Keys of a replica's rows, in a table that the program does not change.

    Sessions initialize tables in the graph itself: there, one replica looks up all.
    """
    form = facts[1].form
    if (
        not isinstance(form, Sharded)
        or form.axis
        or functions.has_ops(op.graph, _CHANGES)
    ):
        return None
    return plan(op, [REPLICATED, form, REPLICATED], form)


_CHANGES = re.compile("(Mutable|Anonymous|InitializeTable|LookupTable(Im|In|Re))")
