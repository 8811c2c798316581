# SPDX-License-Identifier: Apache-2.0
"""Keras' train_function and test_function: several batches per call.

With `steps_per_execution=k`, one function pulls up to k batches and runs their steps in
an in-graph loop. A batch that the replicas cannot divide, as the last may be, ends the
loop, which returns it to be run alone; then the loop continues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator._tf import autograph
from replicator.cluster import faults
from replicator.forms.engine import WholeBatchFunction
from replicator.graph.ir import shapes
from replicator.keras.functions import BatchFunction, is_dense
from replicator.step import repair

_END = object()


def over_iterator(function: Any, steps: int) -> Callable[[Any], Any]:
    """Returns a train_function or test_function for Keras.

    Args:
        function: Runs one batch, of a spec; returns the logs.
        steps: The maximum number of batches per call.
    """
    can_loop = steps > 1 and isinstance(function, BatchFunction)
    loops = _Loops(function, steps)

    def run(iterator: Any) -> Any:
        spec = getattr(iterator, "element_spec", None)
        if can_loop and isinstance(iterator, tf.data.Iterator) and is_dense(spec):
            with faults.named():
                return loops(iterator, spec)
        logs, done = None, False
        for _ in range(steps):
            data = _next(iterator)
            if data is _END:
                break
            with faults.named():
                logs, done = function(data, spec), True
        if not done:
            raise StopIteration
        return logs

    return run


def _next(iterator: Any) -> Any:
    """Returns the next batch, or _END."""
    try:
        return next(iterator)
    except (StopIteration, tf.errors.OutOfRangeError):
        return _END


class _Loops:
    """Runs several batches per call.

    Args:
        function: Runs one batch.
        steps: The maximum number of batches per call.
    """

    def __init__(self, function: BatchFunction, steps: int) -> None:
        self._function, self._steps = function, steps
        self._loops: dict[str, _Loop] = {}  # by the specs of batches

    def __call__(self, iterator: Any, spec: Any) -> Any:
        """Runs batches; returns the logs of the last one.

        Args:
            iterator: A tf.data.Iterator.
            spec: The spec of its batches.

        Raises:
            StopIteration: The iterator is exhausted.
        """
        loop, logs, done = self._loop(spec), None, 0
        while done < self._steps:
            ran, last, batch = loop(iterator, self._steps - done)
            logs, done = last if ran else logs, done + ran
            if done == self._steps or batch is _END:
                break
            logs, done = self._function(batch, spec), done + 1
        if not done:
            raise StopIteration
        return logs

    def _loop(self, spec: Any) -> _Loop:
        key = repr(spec)
        if key not in self._loops:
            leaves = list(map(shapes.of_any_rows, tf.nest.flatten(spec)))
            trace = self._function.trace(spec, leaves)
            self._loops[key] = _Loop(self._function.repl, trace)
        return self._loops[key]


class _Loop:
    """A loop over batches that the replicas divide.

    Args:
        repl: The Replicator.
        trace: Runs a batch.

    Attributes:
        lock: The lock that is held while variables that it uses move.
    """

    def __init__(self, repl: Any, trace: WholeBatchFunction) -> None:
        self._settings, self._trace = repl._settings, trace
        self.lock = repl._settings.lock
        self._call: Callable[..., Any] | None = None

    def trace_again(self) -> None:
        """Discards the loop, because variables have new components."""
        self._trace.trace_again()
        self._call = None

    def __call__(self, iterator: Any, most: int) -> tuple[int, Any, Any]:
        """Runs batches until there is one that the replicas cannot divide.

        Args:
            iterator: Over the batches.
            most: How many to run.

        Returns:
            The number of those that ran, the logs of the last one, and the batch to run
            next, or _END, if it ran fewer.
        """
        if self._call is None:
            with self._settings.factory.traced_by(self):
                self._call = self._built(iterator)
        number, logs, rest = self._call(iterator, tf.constant(most))
        return int(number), logs, rest.get_value() if rest.has_value() else _END

    def _built(self, iterator: Any) -> Callable[..., Any]:
        step = self._trace.function(self._trace.split)
        structure = tf.nest.map_structure(_spec, step.structured_outputs)
        specs = [one for one in tf.nest.flatten(structure) if one is not None]
        if not specs or not all(map(_is_fixed, specs)):
            return lambda iterator, most: (0, None, iterator.get_next_as_optional())
        traced = _traced(self._trace, step, structure, iterator)
        owners, peers = self._settings.factory.owners(), self._settings.peers
        variables = repair.mirrored(traced.captured_inputs, owners)
        return repair.equal_after_errors(traced, variables, peers)


def _traced(trace: WholeBatchFunction, step: Any, structure: Any, iterator: Any) -> Any:
    """Traces a loop.

    Args:
        trace: Says which batches belong in it.
        step: Runs a batch.
        structure: The specs of its results, which are of fixed shapes, or None.
        iterator: An iterator over the dataset, or over another one like it.

    Returns:
        A function of an iterator and the number of batches to run. It returns the
        number that it ran, the last one's logs, and an Optional of the next batch.
    """
    results, spec = tf.nest.flatten(structure), iterator.element_spec

    def pull(iterator: Any) -> tuple[Any, tf.Tensor]:
        """Returns the next batch as an Optional, and whether it belongs in the loop."""
        with tf.device("CPU:0"):
            batch = iterator.get_next_as_optional()
            fits = tf.cond(
                batch.has_value(),
                lambda: _fits(trace, batch.get_value()),
                lambda: tf.constant(False),
            )
        return batch, fits

    @autograph.not_converted
    def several(iterator: Any, count: tf.Tensor) -> Any:
        def turn(number: Any, batch: Any, fits: Any, kept: Any) -> Any:
            logs = step(*tf.nest.flatten(batch.get_value()))
            kept = [leaf for leaf in tf.nest.flatten(logs) if leaf is not None]
            # Finish the step on all devices before anything else begins.
            with tf.control_dependencies(kept):
                number = number + 1
                batch, fits = tf.cond(
                    number < count,
                    lambda: pull(iterator),
                    lambda: (tf.experimental.Optional.empty(spec), tf.constant(False)),
                )
            return number, batch, fits, kept

        zeros = [tf.zeros(one.shape, one.dtype) for one in results if one is not None]
        number, batch, _, kept = tf.while_loop(
            lambda number, batch, fits, kept: fits,
            turn,
            (tf.constant(0), *pull(iterator), zeros),
            parallel_iterations=1,
        )
        leaves = iter(kept)
        logs = [None if one is None else next(leaves) for one in results]
        return number, tf.nest.pack_sequence_as(structure, logs), batch

    count = tf.TensorSpec([], tf.int32)
    return tf.function(several).get_concrete_function(iterator, count)


def _spec(result: Any) -> Any:
    """Returns the spec of a traced function's result, or None for None."""
    if result is None or isinstance(result, tf.TypeSpec):
        return result
    return tf.type_spec_from_value(result)


def _is_fixed(spec: Any) -> bool:
    """Whether zeros can be the initial value of a result in the loop."""
    plain = type(spec) is tf.TensorSpec and spec.dtype not in (tf.resource, tf.variant)
    return plain and spec.shape.is_fully_defined()


def _fits(trace: WholeBatchFunction, batch: Any) -> tf.Tensor:
    """Returns whether the replicas can divide a batch, whose tensors must agree."""
    sizes = [tf.shape(leaf)[0] for leaf in tf.nest.flatten(batch) if leaf.shape.rank]
    same = [tf.equal(size, sizes[0]) for size in sizes]
    return tf.reduce_all([trace.is_split(sizes[0]), *same])
