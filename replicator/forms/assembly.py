# SPDX-License-Identifier: Apache-2.0
"""Builds what replicas do in place of a graph for one device.

The graph is planned for a pattern of what it is given: which inputs are batches, and
which of these have equally many rows. Each replica then replays it on its part of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import autograph
from replicator.forms import homes, liveness, local, told
from replicator.forms.forms import REPLICATED, Fact, Form, Layout, Partial, Sharded
from replicator.forms.propagate import GraphPlan, Scope
from replicator.forms.replay import Replica
from replicator.forms.values import Value
from replicator.graph.ir import shapes
from replicator.optimizers.totals import Totals

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


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph for one device that is planned for replicas.

    Attributes:
        repl: The Replicator on whose devices they run.
        plan: What each of them does.
        which: Which of the graph's first inputs are batches.
        layouts: Of the batches, by their numbers in `which`.
        given: What is given for the other inputs: tensors, and the library's variables.
    """

    repl: Any
    plan: GraphPlan
    which: Pattern
    layouts: Mapping[int, Layout]
    given: Sequence[Any]

    def replayed(
        self,
        tensors: Sequence[tf.Tensor],
        outputs: Sequence[tf.Tensor],
        trained: Collection[Any],
        totals: Totals,
        home: str = "CPU:0",
    ) -> tuple[list[tf.Tensor], Any]:
        """Adds a step in which each replica replays the graph on its part of the rows.

        Args:
            tensors: The graph's first inputs, as on one device.
            outputs: What the step returns, of the graph.
            trained: The variables that a strategy decides on.
            totals: Adds up gradients of several replicas.
            home: The device of the tensors, which divides them: each part moves once.

        Returns:
            The outputs as on one device; and, in a tf.Graph, what runs all of the step.
        """
        with tf.device(home):
            elements = self._divided(tensors)
        sums = homes.Sums(homes.found(self.plan, self.given, trained), totals)
        forms = list[Form]()
        # If other processes have some of the results, they are joined in the step.
        is_shared = self.repl._settings.peers is not None

        def step(rows: Any, parts: Any) -> list[Any]:
            replica = Replica(self.repl, self.plan, sums)
            replica.bring(self.given)
            for layout, length in zip(self.layouts.values(), rows, strict=True):
                replica.deal(layout, length)
            values = [*parts, *self.given]
            for tensor, value in zip(self.plan.inputs, values, strict=True):
                replica.give(tensor, value)
            replica.build(list(self.plan.plans))
            replica.writes.refresh()
            found = [_returned(replica.value(t), is_shared) for t in outputs]
            forms[:] = [form for _, form in found]
            return [*(x for x, _ in found), None]

        if elements:
            returned = self.repl.run(
                autograph.not_converted(step), lambda ctx: elements[ctx.replica_id]
            )
        else:
            returned = self.repl.run(autograph.not_converted(lambda: step((), ())))
        *results, done = returned
        return [_joined(x, form) for x, form in zip(results, forms, strict=True)], done

    def _divided(self, tensors: Sequence[tf.Tensor]) -> list[Any]:
        """Divides the graph's first inputs; the first replicas get one row more.

        Returns:
            For each replica the numbers of rows of the batches, and its parts; nothing
            if nothing is given.
        """
        count = self.repl.num_replicas
        rows, sizes = list[Any](), dict[int, Any]()
        for k in self.layouts:
            batch = tensors[self.which.index(k)]
            static = shapes.size(batch, 0)
            if static is None:
                rows.append(tf.shape(batch)[0])
                sizes[k] = (rows[-1] + tf.range(count - 1, -1, -1)) // count
            else:
                rows.append(static)
                sizes[k] = [(static + more) // count for more in range(count)[::-1]]
        parts = [
            [x] * count if k is None else tf.split(x, sizes[k], num=count)
            for x, k in zip(tensors, self.which, strict=True)
        ]
        if not parts:
            return []
        return [(rows, [part[r] for part in parts]) for r in range(count)]


def planned(
    repl: Any,
    inputs: Sequence[tf.Tensor],
    which: Pattern,
    rows: Pattern,
    given: Sequence[Any],
    targets: Sequence[tf.Tensor | tf.Operation],
    after: Mapping[tf.Operation, Sequence[tf.Operation]] | None = None,
) -> Program:
    """Plans a graph for one device.

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
        return Program(repl, plan, which, layouts, given)


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
