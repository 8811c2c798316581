# SPDX-License-Identifier: Apache-2.0
"""Keras' train_function and test_function: several batches per call.

With `steps_per_execution=k`, one function pulls up to k batches and runs their steps in
an in-graph loop. All batches of a loop are of one kind (functions.py). A batch of
another kind, as the last may be, ends the loop, which returns it to be run alone; then
the loop continues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator.cluster import faults
from replicator.keras.functions import BatchFunction, Traced, is_dense

_do_not_convert = tf.autograph.experimental.do_not_convert
_END = object()


def over_iterator(function: BatchFunction, steps: int) -> Callable[[Any], Any]:
    """Returns a train_function or test_function for Keras.

    Args:
        function: Runs one batch; returns the logs.
        steps: The maximum number of batches per call.
    """
    loops = _Several(function, steps)

    def run(iterator: Any) -> Any:
        spec = getattr(iterator, "element_spec", None)
        if loops.takes(iterator, spec):
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


@dataclasses.dataclass
class _Loop:
    """A loop over batches of one kind.

    Attributes:
        call: Takes an iterator and the number of batches to run. Returns the number
            that it ran, the last one's logs, and an Optional of a batch of another
            kind.
        misses: How many times in a row the first batch was of another kind.
    """

    call: Callable[..., Any]
    misses: int = 0


class _Several:
    """Runs several batches per call, in an in-graph loop.

    Args:
        function: Runs one batch.
        steps: The maximum number of batches per call.
    """

    def __init__(self, function: BatchFunction, steps: int) -> None:
        self._function, self._steps = function, steps
        self._key: tuple[Any, Any] = (None, None)

    def takes(self, iterator: Any, spec: Any) -> bool:
        """Whether the loop can pull its batches from an iterator.

        Args:
            iterator: The iterator that Keras passes.
            spec: The spec of its batches, if it has one.
        """
        if self._steps == 1 or self._function.eager:
            return False
        return isinstance(iterator, tf.data.Iterator) and is_dense(spec)

    def __call__(self, iterator: Any, spec: Any) -> Any:
        """Runs batches; returns the logs of the last one.

        Args:
            iterator: A tf.data.Iterator.
            spec: The spec of its batches.

        Raises:
            StopIteration: The iterator is exhausted.
        """
        key, loops = self._key_of(spec), self._function.loops
        logs, done = None, 0
        while done < self._steps:
            loop = loops.get(key)
            if loop is None:
                data = _next(iterator)
            else:
                number, last, odd = loop.call(iterator, tf.constant(self._steps - done))
                ran = int(number)
                if ran:
                    logs, loop.misses = last, 0
                done += ran
                if done == self._steps:
                    break
                data = odd.get_value() if odd.has_value() else _END
                loop.misses += data is not _END and not ran
            if data is _END:
                break
            logs, traced = self._function.run(data, spec)
            done += 1
            # A single odd batch at the end does not justify another loop.
            if traced and (key not in loops or (loop and loop.misses > 1)):
                loops[key] = _loop(self._function, traced, iterator)
        if not done:
            raise StopIteration
        return logs

    def _key_of(self, spec: Any) -> Any:
        """Returns a key that is equal for equal specs."""
        if self._key[0] is not spec:
            leaves = tuple(tf.nest.flatten(spec))
            structure = tf.nest.map_structure(lambda _: 0, spec)
            self._key = (spec, (repr(structure), leaves))
        return self._key[1]


def _loop(function: BatchFunction, traced: Traced, iterator: Any) -> _Loop | None:
    """Builds a loop over an iterator's batches of the kind that a function takes.

    Args:
        function: Defines the kinds of batches.
        traced: Runs a batch.
        iterator: An iterator over the dataset, or over another one like it.

    Returns:
        None if a step's results have no fixed shapes, which a loop needs.
    """
    structure = tf.nest.map_structure(_spec, traced.function.structured_outputs)
    results = tf.nest.flatten(structure)
    specs = [spec for spec in results if spec is not None]
    if not specs or not all(map(_is_fixed, specs)):
        return None
    spec = iterator.element_spec

    def pull(iterator: Any) -> tuple[Any, tf.Tensor]:
        """Returns the next batch as an Optional, and whether it belongs in the loop."""
        with tf.device("CPU:0"):
            batch = iterator.get_next_as_optional()
            fits = tf.cond(
                batch.has_value(),
                lambda: _fits(function, traced.split, batch.get_value()),
                lambda: tf.constant(False),
            )
        return batch, fits

    @_do_not_convert
    def several(iterator: Any, count: tf.Tensor) -> Any:
        def turn(number: Any, batch: Any, fits: Any, kept: Any) -> Any:
            logs = traced.function(*tf.nest.flatten(batch.get_value()))
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

        zeros = [tf.zeros(leaf.shape, leaf.dtype) for leaf in specs]
        number, batch, _, kept = tf.while_loop(
            lambda number, batch, fits, kept: fits,
            turn,
            (tf.constant(0), *pull(iterator), zeros),
            parallel_iterations=1,
        )
        leaves = iter(kept)
        logs = [None if result is None else next(leaves) for result in results]
        return number, tf.nest.pack_sequence_as(structure, logs), batch

    count = tf.TensorSpec([], tf.int32)
    concrete = tf.function(several).get_concrete_function(iterator, count)
    return _Loop(function.equal_after_errors(concrete))


def _spec(result: Any) -> Any:
    """Returns the spec of a traced function's result, or None for None."""
    if result is None or isinstance(result, tf.TypeSpec):
        return result
    return tf.type_spec_from_value(result)


def _is_fixed(spec: Any) -> bool:
    """Whether zeros can be the initial value of a result in the loop."""
    plain = type(spec) is tf.TensorSpec and spec.dtype not in (tf.resource, tf.variant)
    return plain and spec.shape.is_fully_defined()


def _fits(function: BatchFunction, split: bool, batch: Any) -> tf.Tensor:
    """Returns whether a batch is of a kind; if its tensors disagree, it is of none."""
    sizes = [tf.shape(leaf)[0] for leaf in tf.nest.flatten(batch) if leaf.shape.rank]
    same = [tf.equal(size, sizes[0]) for size in sizes]
    return tf.reduce_all([function.is_of(split, sizes[0]), *same])
