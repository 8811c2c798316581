# SPDX-License-Identifier: Apache-2.0
"""Traces a function that was written for one device, for arguments of one kind.

The function becomes a step of the replicas. Its graph tells how losses and results
depend on the examples (see examples.py), and so how gradients are weighted and results
combined. Where nothing makes these equal those of one device, each replica computes the
whole batch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from replicator import _tf, context, errors
from replicator.autodist import examples, pulled, refusals, results, summaries
from replicator.costs import cost
from replicator.graph.ir import shapes
from replicator.graph.order import ordering
from replicator.inputs import shards
from replicator.values import PerReplica
from replicator.variables import synchronized


class _CurrentTensors(threading.local):
    """The tensors that the current call of each thread passes."""

    tensors: Sequence[tf.Tensor] = ()


class Signature(NamedTuple):
    """Properties of the arguments of all calls that share a trace.

    Attributes:
        structure: The arguments of one such call.
        array_indices: The indices of those leaves that are arrays.
        has_rows: For each array: whether its rows are examples.
        all_have_some: Whether every replica is known to have an example.
    """

    structure: Any
    array_indices: Sequence[int]
    has_rows: Sequence[bool]
    all_have_some: bool


class Trace:
    """The function, traced for arguments of one kind.

    Args:
        function: The user's function.
        repl: The Replicator that runs it.
        signature: The kind of the arguments.
        loss: What the user declares losses to be; None if nothing.
        owner: Returns the first argument of a method.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        repl: Any,
        signature: Signature,
        loss: str | None,
        owner: Callable[[], Any] | None,
    ) -> None:
        self._function, self._repl, self._signature = function, repl, signature
        self._loss, self._owner = loss, owner
        self._is_split = signature.has_rows  # all False if the batch cannot be split
        indices = signature.array_indices
        leaves = tf.nest.flatten(signature.structure)
        self._other_leaves = [None if k in indices else x for k, x in enumerate(leaves)]
        self._tf_function = tf.function(
            self._build, reduce_retracing=True, autograph=False
        )
        self._concrete_function: Any = None
        self._run_untaped: Callable[[], Any] | None = None
        self._current, self._lock = _CurrentTensors(), threading.RLock()
        self._output: Any = None  # of the function, on the replica traced last
        self._results: list[results.Result] = []  # of the leaves of that output

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Runs the function.

        Args:
            tensors: The arrays among its arguments.
        """
        if tf.executing_eagerly() and not _tf.may_record():
            previous, self._current.tensors = self._current.tensors, tensors
            try:
                with self._lock:
                    if self._run_untaped is None:
                        self._run_untaped = self._trace_untaped(tensors)
                return self._run_untaped()
            finally:
                self._current.tensors = previous
        if self._concrete_function is None:
            self._concrete_function = self._trace_with_fallback(
                lambda: self._tf_function.get_concrete_function(self._specs(tensors))
            )
        return self._concrete_function(*tensors)

    def _trace_with_fallback(self, trace: Callable[[], Any]) -> Any:
        """Returns a trace; without splitting the batch if it cannot be split.

        Raises:
            UnsupportedError: Neither trace succeeds; the error is that of the first.
        """
        try:
            return trace()
        except errors.UnsupportedError as error:
            if not any(self._is_split):
                raise
            self._is_split = [False] * len(self._signature.has_rows)
            try:
                function = trace()
            except errors.ReplicatorError:
                self._is_split = self._signature.has_rows
                raise error from None
            if self._repl.num_replicas > 1:
                name = name_of(self._function)
                logging.warning("%s", refusals.unsplit(f"function {name}", error))
            return function

    def _specs(self, tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
        """Returns specs that the tensors of all calls match."""
        return [
            tf.TensorSpec(shapes.with_rows(t.shape) if has_rows else t.shape, t.dtype)
            for t, has_rows in zip(tensors, self._signature.has_rows, strict=True)
        ]

    def _trace_untaped(self, tensors: Sequence[tf.Tensor]) -> Callable[[], Any]:
        """Traces the function like a step; returns a callable that runs the trace.

        Its calls take less time than a tf.function's, but no tape can differentiate
        them.
        """

        def current_tensor(k: int) -> tf.Tensor:
            return self._current.tensors[k]

        def build() -> Any:
            return self._build(
                [
                    _tf.capture_at_call(functools.partial(current_tensor, k), spec)
                    for k, spec in enumerate(self._specs(tensors))
                ]
            )

        function = self._trace_with_fallback(
            lambda: _tf.trace(build, ordering.order_as_created, alone=False)
        )
        run = _tf.prepare_call(function, cost.share_memory(self._repl.devices))
        return lambda: _tf.pack_results(function, run())

    @_tf.not_converted
    def _step(
        self, count: Any, total: Any, is_first: Any, tensors: Sequence[tf.Tensor]
    ) -> Any:
        """Runs the function on one replica; the step_fn of the Replicator."""
        replica = context.require("a function of AutoDist")
        leaves = list(self._other_leaves)
        for k, tensor in zip(self._signature.array_indices, tensors, strict=True):
            leaves[k] = tensor
        args, kwargs = tf.nest.pack_sequence_as(self._signature.structure, leaves)
        if self._owner is not None:
            args = (self._owner(), *args)
        batches = [
            t for t, is_split in zip(tensors, self._is_split, strict=True) if is_split
        ]
        shard = shards.Shard(None, count, total) if batches else None
        replica_examples = examples.Examples(
            replica, batches, self._loss, self._signature.all_have_some
        )
        replica.synchronizes = replica_examples.weighed
        replica.agrees = replica_examples.agreed
        replica.takes = lambda value: tf.where(is_first, value, tf.zeros_like(value))
        graph = tf.compat.v1.get_default_graph()
        start = _tf.operation_count(graph)
        with replica.weighing(shard), summaries.once(is_first):
            function = _tf.function_of(self._function)
            self._output = _tf.call_converted(
                functools.partial(function, **kwargs), args
            )
            replica_examples.go_on(graph)
            replica_examples.check()
            if replica.num_replicas > 1:
                built = graph.get_operations()[start:]
                pulled.refuse(name_of(self._function), built)
                summaries.combine(built, replica_examples)
            synchronized.resolve(replica)
            output_leaves = tf.nest.flatten(self._output)
            self._results = results.look(output_leaves, replica_examples)
            return [*output_leaves, *results.needed(self._results)]

    def _build(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Splits the arguments, runs the step and combines the results."""
        count = self._repl.num_replicas
        parts, counts, total = _split_batches(tensors, self._is_split, count)
        is_first = PerReplica([tf.constant(r == 0) for r in range(count)])
        step_args = PerReplica(counts), total, is_first, PerReplica(parts)
        returned = self._repl.run(self._step, args=step_args)
        leaves = results.joined(self._results, returned, counts, any(self._is_split))
        return tf.nest.pack_sequence_as(self._output, leaves)


def _split_batches(
    tensors: Sequence[tf.Tensor], are_split: Sequence[bool], num_replicas: int
) -> tuple[list[list[tf.Tensor]], list[tf.Tensor], tf.Tensor]:
    """Splits tensors; returns each replica's parts, its number of examples, their sum.

    A replica without an example is lent the first one, and has weight zero.
    """
    sizes = [
        tf.shape(t)[0]
        for t, is_split in zip(tensors, are_split, strict=True)
        if is_split
    ]
    total = sizes[0] if sizes else tf.constant(num_replicas)
    counts = [shards.count(total, r, num_replicas) for r in range(num_replicas)]
    parts, begin = [], tf.constant(0)
    for num_examples in counts:
        start = tf.where(num_examples > 0, begin, 0)
        end = start + tf.maximum(num_examples, 1)
        parts.append(
            [
                tensor[start:end] if is_split else tensor
                for tensor, is_split in zip(tensors, are_split, strict=True)
            ]
        )
        begin += num_examples
    return parts, counts, total


def name_of(function: Any) -> str:
    """Returns the name of a user's function, for messages."""
    return getattr(function, "__name__", type(function).__name__)
