# SPDX-License-Identifier: Apache-2.0
"""Runs a function that was written for whole batches on the replicas of a Replicator.

The function is traced once, for one device, for batches of all sizes. A batch is split
over the replicas, unless some would get no example at all: then each replica computes
the whole batch. What replicas do is built once for each of these; see assembly.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import devices, errors
from replicator._tf import autograph, choice, functions, tapes
from replicator.costs import cost
from replicator.forms import told
from replicator.forms.assembly import Pattern, Program, pattern, planned
from replicator.forms.traced import Made, Traced
from replicator.graph.ir import shapes
from replicator.graph.order import ordering
from replicator.inputs import shared_pipelines
from replicator.optimizers.totals import Totals
from replicator.step import repair


class _Arguments(threading.local):
    """The tensors that the current call of each thread passes."""

    tensors: Sequence[tf.Tensor] = ()


class WholeBatchFunction:
    """A function of whole batches, which a Replicator runs.

    Args:
        function: A function for one device, of tensors.
        repl: The Replicator under whose context its variables were made, or are made.
        specs: Of the tensors; dense ones whose first dimension is None are batches.
        empty: Whether replicas may be given no rows. Else batches of fewer rows than
            there are replicas are computed whole by each of them.
        made: The variables that it has made in other traces.

    Attributes:
        split: The pattern of equally long batches, which the replicas divide.
        memory: What compressors remember, for checkpoints.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        repl: Any,
        specs: Sequence[tf.TypeSpec],
        empty: bool = False,
        made: Made | None = None,
    ) -> None:
        self._repl, self._few = repl, 0 if empty else repl.num_replicas
        parts = [tf.nest.flatten(spec, expand_composites=True) for spec in specs]
        self._signature = [part for its in parts for part in its]
        # One replica computes all rows as they are.
        self._batches = [
            repl.num_replicas > 1 and is_batch(spec)
            for spec, its in zip(specs, parts, strict=True)
            for _ in its
        ]
        self.split: Pattern = tuple([0 if batch else None for batch in self._batches])
        self._lock, self._arguments = threading.RLock(), _Arguments()
        self._built: dict[Pattern, Callable[[], Any]] = {}
        self._functions: dict[Pattern, Any] = {}

        @autograph.not_converted
        def flat(*tensors: tf.Tensor) -> Any:
            packed = tf.nest.pack_sequence_as(
                list(specs), list(tensors), expand_composites=True
            )
            return autograph.call_converted(function, packed)

        self._traced = Traced(flat, repl, self._signature, made or Made(), self)
        self._captured = self._traced.captured
        name = "a program for whole batches"
        self._totals = Totals(name, self._traced.compressions)
        self.memory, self._warned = self._totals.memory, False

    @property
    def lock(self) -> Any:
        """The lock that is held while variables that it uses move."""
        return self._repl._settings.lock

    def trace_again(self) -> None:
        """Discards the steps: the trace for one device stays as it is."""
        self._built.clear()
        self._functions.clear()

    def __call__(self, *args: Any) -> Any:
        """Runs the function on all replicas, each with its part of the rows.

        Args:
            *args: The tensors that its arguments consist of. If it is unknown how many
                rows a batch has, all have equally many.
        """
        tensors = [
            x if isinstance(x, tf.Tensor) else tf.convert_to_tensor(x, spec.dtype)
            for x, spec in zip(args, self._signature, strict=True)
        ]
        which = self.pattern(tensors)
        if which is None:
            return tf.cond(
                self.is_split(tf.shape(tensors[self.split.index(0)])[0]),
                lambda: self.function(self.split)(*tensors),
                lambda: self.function((None,) * len(tensors))(*tensors),
            )
        if tf.executing_eagerly() and not tapes.may_record():
            return self.run(which, tensors)
        return self.function(which)(*tensors)

    def pattern(self, tensors: Sequence[tf.Tensor]) -> Pattern | None:
        """Returns how the replicas divide tensors; None if their sizes are unknown."""
        pairs = zip(tensors, self._batches, strict=True)
        rows = tuple([shapes.size(x, 0) if batch else None for x, batch in pairs])
        is_known = rows.count(None) == self._batches.count(False)
        return pattern(rows, self._few) if is_known else None

    def is_split(self, rows: Any) -> Any:
        """Whether the replicas divide a batch of so many rows; else each has all."""
        return rows >= self._few

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

                traced = tf.function(autograph.not_converted(add), autograph=False)
                function = traced.get_concrete_function(*self._signature)
                self._functions[which] = function
            return self._functions[which]

    def program(self, which: Pattern, rows: Pattern | None = None) -> Program:
        """Returns what replicas do for a pattern.

        Args:
            which: The pattern.
            rows: How many rows each argument has now, None where that is unknown.
        """
        graph, rows = self._traced.graph, rows or (None,) * len(which)
        # In an order that is the same in all processes.
        controls = sorted(graph.control_outputs, key=lambda op: op.name)
        targets = [*controls, *graph.outputs]
        given = self._captured
        return planned(self._repl, graph.inputs, which, rows, given, targets)

    def _build(self, which: Pattern) -> Callable[[], Any]:
        def build() -> Any:
            tensors = [
                functions.capture_at_call(functools.partial(self._argument, k), spec)
                for k, spec in enumerate(self._signature)
            ]
            return self.add(which, tensors)

        settings = self._repl._settings
        with settings.factory.traced_by(self):
            traced = choice.trace(build, ordering.order_as_created, only_step=False)
        run = choice.prepare_call(traced, cost.share_memory(self._repl.devices))
        if settings.peers is not None:
            text = f"runs the function called at {errors.user_line()}"
            run = settings.peers.monitor.tracked(run, traced, text)
        variables = repair.mirrored(traced.captured_inputs, settings.factory.owners())
        run = repair.equal_after_errors(run, variables, settings.peers)
        run = devices.ordered(run, settings.world.devices)

        def call() -> Any:
            try:
                return choice.pack_results(traced, run())
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
        current = self._arguments.tensors or tensors
        rows = tuple(
            None if k is None else shapes.size(x, 0)
            for x, k in zip(current, which, strict=True)
        )
        program = self.program(which, rows)
        self._warned = self._warned or told.warn_of_gathers(program.plan, rows)
        trained = self._repl._settings.factory.trained().values()
        outputs = self._traced.graph.outputs
        joined, _ = program.replayed(tensors, outputs, trained, self._totals)
        return self._packed(joined)

    def _argument(self, k: int) -> tf.Tensor:
        return self._arguments.tensors[k]

    def _packed(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Returns tensors in the structure that the function returns."""
        structure, found = self._traced.structure, iter(tensors)
        leaves = tf.nest.flatten(structure, expand_composites=True)
        flat = [leaf if leaf is None else next(found) for leaf in leaves]
        return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)


def is_batch(spec: Any) -> bool:
    """Whether a tensor of a spec is split into rows, if there are enough."""
    if type(spec) is not tf.TensorSpec or spec.shape.rank == 0:
        return False
    return shapes.size(spec, 0) is None
