# SPDX-License-Identifier: Apache-2.0
"""Runs a function that was written for whole batches on the replicas of a Replicator.

The function is traced once, for one device. Its graph is planned once for each pattern
of what it is given: which arguments are batches, and which of these have equally many
rows. Each replica then replays the graph on its part of the rows.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, devices, errors
from replicator.costs import cost
from replicator.forms import homes, local, told
from replicator.forms.forms import REPLICATED, Fact, Form, Layout, Partial, Sharded
from replicator.forms.propagate import GraphPlan, Scope
from replicator.forms.replay import Replica
from replicator.forms.traced import Made, Traced
from replicator.forms.values import Value
from replicator.graph.ir import shapes
from replicator.graph.order import ordering
from replicator.inputs import shared_pipelines
from replicator.optimizers.totals import Totals
from replicator.step import repair

Pattern = tuple[int | None, ...]


def pattern(
    inputs: Sequence[tf.TensorSpec], rows: Sequence[int | None], few: int
) -> Pattern:
    """Returns a number per input, the same for equally long batches; None: not split.

    Args:
        inputs: Specs; those whose first dimension is unknown are batches.
        rows: The number of rows of what is given for each; None: it is not given.
        few: Fewer rows are not split. Not all kernels take empty batches (oneDNN's
            Conv2D returns the wrong shape), and one row would broadcast.
    """
    are_batches = list(map(_is_batch, inputs))
    given = zip(are_batches, rows, strict=True)
    lengths = list(dict.fromkeys(n for batch, n in given if batch and n is not None))
    if not lengths or min(lengths) < few:
        return (None,) * len(inputs)
    numbers: dict[int | None, int] = {n: k for k, n in enumerate(lengths)}
    pairs = zip(are_batches, rows, strict=True)
    return tuple(numbers.get(n, 0) if batch else None for batch, n in pairs)


def _is_batch(spec: tf.TensorSpec) -> bool:
    return spec.shape.rank not in (None, 0) and shapes.size(spec, 0) is None


def layouts_of(which: Pattern) -> dict[int, Layout]:
    """Returns a layout for each number in a pattern."""
    numbers = [k for k in which if k is not None]
    return {k: Layout(f"batch {k}" if k else "batch") for k in numbers}


def plan_of(
    inputs: Sequence[tf.Tensor],
    which: Pattern,
    given: Sequence[Any],
    targets: Sequence[tf.Operation],
    after: Mapping[tf.Operation, Sequence[tf.Operation]] | None = None,
    local_statistics: bool = False,
) -> tuple[GraphPlan, dict[int, Layout]]:
    """Returns the plan of a graph, and the layouts of its batches.

    Args:
        inputs: The tensors that are given.
        which: Which of the first ones are batches.
        given: What is given for the others: tensors, and the library's variables.
        targets: What is computed.
        after: Ops that come before others, though nothing in the graph says so.
        local_statistics: Whether batch normalization uses those of each replica's rows.
    """
    layouts = layouts_of(which)
    forms = [REPLICATED if k is None else Sharded(0, layouts[k]) for k in which]
    facts = [Fact(form) for form in [*forms, *map(_form_of, given)]]
    own = local.Statistics(inputs[0].graph) if local_statistics and layouts else None
    while True:
        scope = Scope(own=own)
        for _ in range(2):  # the second time, all sums that something needs are known
            plan = GraphPlan(inputs, facts, after)
            scope.extend(plan, targets)
            scope.whole.update(homes.gradients(plan))
            if own is not None:
                own.settle(plan)
        if own is None or not own.drop():
            break
    if own is not None:
        told.warn_of_statistics(list(own.missed))
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
            _tf.not_converted(step), lambda ctx: elements[ctx.replica_id]
        )
    else:
        returned = repl.run(_tf.not_converted(lambda: step((), ())))
    *results, done = returned
    return [_joined(x, form) for x, form in zip(results, forms, strict=True)], done


class _Arguments(threading.local):
    """The tensors that the current call of each thread passes."""

    tensors: Sequence[tf.Tensor] = ()


class WholeBatchFunction:
    """A function of whole batches, which a Replicator runs.

    Args:
        function: A function for one device, of flat tensors.
        repl: The Replicator under whose context its variables were made, or are made.
        signature: Of its arguments; those whose first dimension is None are batches.
        empty: Whether replicas may be given no rows. Else batches of fewer rows than
            there are replicas are computed whole by each of them.
        made: The variables that it has made in other traces.
        local_statistics: Whether batch normalization uses those of each replica's rows.

    Attributes:
        memory: What compressors remember, for checkpoints.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        repl: Any,
        signature: Sequence[tf.TensorSpec],
        empty: bool = False,
        made: Made | None = None,
        local_statistics: bool = False,
    ) -> None:
        self._local_statistics = local_statistics
        self._repl, self._signature = repl, list(signature)
        self._few = 0 if empty else repl.num_replicas
        self._lock, self._arguments = threading.RLock(), _Arguments()
        self._built: dict[Pattern, Callable[[], Any]] = {}
        self._functions: dict[Pattern, Any] = {}
        self._traced = Traced(function, repl, self._signature, made or Made(), self)
        self._captured = self._traced.captured
        name = "a program for whole batches"
        self._totals = Totals(name, self._traced.compressions)
        self.memory, self._warns = self._totals.memory, True

    @property
    def lock(self) -> Any:
        """The lock that is held while variables that it uses move."""
        return self._repl._settings.lock

    def trace_again(self) -> None:
        """Discards the steps: the trace for one device stays as it is."""
        self._built.clear()
        self._functions.clear()

    def __call__(self, *args: Any) -> Any:
        """Runs the function on all replicas, each with its part of the rows."""
        pairs = zip(args, self._signature, strict=True)
        tensors = [tf.convert_to_tensor(x, spec.dtype) for x, spec in pairs]
        rows = [shapes.size(x, 0) if x.shape.rank else None for x in tensors]
        return self.run(pattern(self._signature, rows, self._few), tensors)

    def run(self, which: Pattern, tensors: Sequence[tf.Tensor]) -> Any:
        """Runs the function eagerly, where no tape records.

        Args:
            which: The pattern of the arguments.
            tensors: The arguments.
        """
        arguments = self._arguments
        before, arguments.tensors = arguments.tensors, tensors
        try:
            built = self._built.get(which)
            if built is None:
                peers = self._repl._settings.peers
                shared_pipelines.check_values("a function", tensors, peers)
                with self._lock:
                    built = self._built.get(which) or self._build(which)
                    self._built[which] = built
            return built()
        finally:
            arguments.tensors = before

    def function(self, which: Pattern) -> Any:
        """Returns a function of the arguments, which tapes and functions can call."""
        with self._lock:
            if which not in self._functions:

                def add(*tensors: tf.Tensor) -> Any:
                    return self.add(which, tensors)

                traced = tf.function(_tf.not_converted(add), autograph=False)
                function = traced.get_concrete_function(*self._signature)
                self._functions[which] = function
            return self._functions[which]

    def plan(self, which: Pattern) -> tuple[GraphPlan, dict[int, Layout]]:
        """Returns the plan for a pattern, and the layouts of its batches."""
        graph = self._traced.graph
        # In an order that is the same in all processes.
        controls = sorted(graph.control_outputs, key=lambda op: op.name)
        targets = [*controls, *(t.op for t in graph.outputs)]
        is_local = self._local_statistics
        return plan_of(
            *(graph.inputs, which, self._captured, targets), local_statistics=is_local
        )

    def _build(self, which: Pattern) -> Callable[[], Any]:
        def build() -> Any:
            tensors = [
                _tf.capture_at_call(functools.partial(self._argument, k), spec)
                for k, spec in enumerate(self._signature)
            ]
            return self.add(which, tensors)

        settings = self._repl._settings
        with settings.factory.traced_by(self):
            traced = _tf.trace(build, ordering.order_as_created, alone=False)
        run = _tf.prepare_call(traced, cost.share_memory(self._repl.devices))
        if settings.peers is not None:
            text = f"runs the function called at {errors.user_line()}"
            run = settings.peers.doing.noted(run, traced, text)
        variables = repair.mirrored(traced.captured_inputs, settings.factory.owners())
        run = repair.equal_after_errors(run, variables, settings.peers)
        run = devices.ordered(run, settings.world.devices)

        def call() -> Any:
            try:
                return _tf.pack_results(traced, run())
            except tf.errors.OpError as error:
                told.note_lines(error, traced.graph)
                raise

        return call

    def add(self, which: Pattern, tensors: Sequence[tf.Tensor]) -> Any:
        """Adds the replicas' steps to the function that is being traced.

        Args:
            which: The pattern of the arguments.
            tensors: The arguments, of one device.

        Returns:
            What the function returns for them.
        """
        plan, layouts = self.plan(which)
        self._warn(plan, which, tensors)
        with tf.device("CPU:0"):  # where batches are: each part moves once
            elements = divided(self._repl.num_replicas, which, layouts, tensors)
        joined, _ = replayed(
            *(self._repl, plan, self._sums(plan), list(layouts.values()), elements),
            *(self._captured, self._traced.graph.outputs),
        )
        return self._packed(joined)

    def _warn(
        self, plan: GraphPlan, which: Pattern, tensors: Sequence[tf.Tensor]
    ) -> None:
        """Warns once of what costs much, if it is known how long batches are."""
        current = self._arguments.tensors or tensors
        batches = [x for x, k in zip(current, which, strict=True) if k is not None]
        rows = shapes.size(batches[0], 0) if batches else None
        if self._warns and rows is not None:
            self._warns = False
            told.warn_of_gathers(plan, rows)

    def _sums(self, plan: GraphPlan) -> homes.Sums:
        trained = list(self._repl._settings.factory.trained().values())
        return homes.Sums(homes.found(plan, self._captured, trained), self._totals)

    def _argument(self, k: int) -> tf.Tensor:
        return self._arguments.tensors[k]

    def _packed(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Returns tensors in the structure that the function returns."""
        structure, found = self._traced.structure, iter(tensors)
        leaves = tf.nest.flatten(structure, expand_composites=True)
        flat = [leaf if leaf is None else next(found) for leaf in leaves]
        return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)


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
