# SPDX-License-Identifier: Apache-2.0
"""Builds what replicas do in place of a graph for one device.

The graph is planned for a pattern of what it is given: which inputs are batches, and
which of these have equally many rows. Each replica then replays it on its part of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import autograph
from replicator.forms import homes, liveness, local, told
from replicator.forms.forms import REPLICATED, Fact, Form, Layout, Partial, Sharded
from replicator.forms.propagate import GraphPlan, Scope
from replicator.forms.replay import Replica
from replicator.forms.values import Value
from replicator.graph.ir import shapes

Pattern = tuple[int | None, ...]


@functools.lru_cache  # each call of a function asks
def pattern(rows: Pattern, few: int) -> Pattern:
    """Returns a number per input, the same for equally long batches; None: not split.

    Args:
        rows: The number of rows of each input; None: it is no batch.
        few: Fewer rows are not split. Not all kernels take empty batches (oneDNN's
            Conv2D returns the wrong shape), and one row would broadcast.
    """
    lengths = list(dict.fromkeys(n for n in rows if n is not None))
    if not lengths or min(lengths) < few:
        return (None,) * len(rows)
    numbers = {n: k for k, n in enumerate(lengths)}
    return tuple([None if n is None else numbers[n] for n in rows])


def _layouts(which: Pattern, rows: Pattern) -> dict[int, Layout]:
    """Returns a layout for each number in a pattern."""
    batches = {k: n for k, n in zip(which, rows, strict=True) if k is not None}
    return {
        k: Layout(f"batch {k}" if k else "batch", rows=n) for k, n in batches.items()
    }


def plan_of(
    repl: Any,
    inputs: Sequence[tf.Tensor],
    which: Pattern,
    rows: Pattern,
    given: Sequence[Any],
    targets: Sequence[tf.Tensor | tf.Operation],
    after: Mapping[tf.Operation, Sequence[tf.Operation]] | None = None,
) -> tuple[GraphPlan, dict[int, Layout]]:
    """Returns the plan of a graph, and the layouts of its batches.

    Args:
        repl: The Replicator.
        inputs: The tensors that are given.
        which: Which of the first ones are batches.
        rows: How many rows each of these has now, None if that is unknown.
        given: What is given for the others: tensors, and the library's variables.
        targets: Tensors that are computed, and ops that run.
        after: Ops that come before others, though nothing in the graph says so.
    """
    layouts = _layouts(which, rows)
    forms = [REPLICATED if k is None else Sharded(0, layouts[k]) for k in which]
    facts = [Fact(form) for form in [*forms, *map(_form_of, given)]]
    is_local = repl._settings.local_statistics and layouts
    own = local.Statistics(inputs[0].graph) if is_local else None
    while True:
        scope, plan = Scope(own=own), GraphPlan(inputs, facts, after)
        scope.extend(plan, [getattr(one, "op", one) for one in targets])
        scope.whole.update(homes.gradients(plan))
        if own is not None:
            own.settle(plan)
        scope.revise(plan)
        if own is not None:
            own.settle(plan)
            if own.drop():
                continue
            told.warn_of_statistics(list(own.missed))
        liveness.mark(plan, targets)
        return plan, layouts


def divided(
    count: int,
    which: Pattern,
    layouts: Mapping[int, Layout],
    tensors: Sequence[tf.Tensor],
) -> list[Any]:
    """Divides what is given; the first replicas get one row more.

    Args:
        count: The number of replicas.
        which: Which tensors are batches.
        layouts: Of the batches.
        tensors: What is given.

    Returns:
        For each replica the numbers of rows of the batches, and its parts; nothing if
        nothing is given.
    """
    rows, sizes = list[Any](), dict[int, Any]()
    for k in layouts:
        batch = tensors[which.index(k)]
        static = shapes.size(batch, 0)
        if static is None:
            rows.append(tf.shape(batch)[0])
            sizes[k] = (rows[-1] + tf.range(count - 1, -1, -1)) // count
        else:
            rows.append(static)
            sizes[k] = [(static + more) // count for more in range(count)[::-1]]
    parts = [
        [x] * count if k is None else tf.split(x, sizes[k], num=count)
        for x, k in zip(tensors, which, strict=True)
    ]
    return [(rows, [part[r] for part in parts]) for r in range(count)] if parts else []


def replayed(
    repl: Any,
    plan: GraphPlan,
    sums: homes.Sums,
    layouts: Sequence[Layout],
    elements: Sequence[Any],
    given: Sequence[Any],
    outputs: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], Any]:
    """Adds a step in which each replica replays a graph on its part of the rows.

    Args:
        repl: The Replicator.
        plan: The plan of the graph.
        sums: What sums are for.
        layouts: Of the batches.
        elements: For each replica the numbers of rows of the batches, and its parts.
        given: What else is given to all: tensors, and the library's variables.
        outputs: What the step returns, of the graph.

    Returns:
        The outputs as on one device; and, in a tf.Graph, what runs all of the step.
    """
    forms = list[Form]()
    # If other processes have some of the results, they are joined in the step.
    is_shared = repl._settings.peers is not None

    def step(rows: Any, parts: Any) -> list[Any]:
        replica = Replica(repl, plan, sums)
        replica.bring(given)
        for layout, length in zip(layouts, rows, strict=True):
            replica.deal(layout, length)
        for tensor, value in zip(plan.inputs, [*parts, *given], strict=True):
            replica.give(tensor, value)
        replica.build(list(plan.plans))
        replica.writes.refresh()
        values = [replica.value(t) for t in outputs]
        found = [_returned(value, is_shared) for value in values]
        forms[:] = [form for _, form in found]
        return [*(x for x, _ in found), None]

    if elements:
        returned = repl.run(
            autograph.not_converted(step), lambda ctx: elements[ctx.replica_id]
        )
    else:
        returned = repl.run(autograph.not_converted(lambda: step((), ())))
    *results, done = returned
    return [_joined(x, form) for x, form in zip(results, forms, strict=True)], done


def _form_of(captured: Any) -> Form:
    """Returns the form in which a variable holds its value: perhaps as a sum."""
    placement = getattr(captured, "placement", None)
    adds_up = placement is not None and placement.adds_up
    return Partial() if adds_up else REPLICATED


def _returned(value: Value, whole: bool = False) -> tuple[tf.Tensor, Form]:
    """Returns what a replica returns of a value, and its form: the caller joins them.

    Args:
        value: The value.
        whole: Whether each replica returns all of it.
    """
    form = REPLICATED if whole else value.fact.form
    is_sum = isinstance(form, Partial) and form.how == "sum"
    is_part = isinstance(form, Sharded) and form.outer == 1
    if is_part or (is_sum and value.waits_for(REPLICATED)):
        return value.copy(), form
    return value.copy(REPLICATED), REPLICATED


def _joined(copies: Any, form: Form) -> tf.Tensor:
    values = list(copies)
    if form == REPLICATED:
        return values[0]
    return (
        tf.concat(values, form.axis) if isinstance(form, Sharded) else tf.add_n(values)
    )
