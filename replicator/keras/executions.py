# SPDX-License-Identifier: Apache-2.0
"""What Keras calls as train_function and test_function: several batches per call.

With `steps_per_execution=k`, one function pulls up to k batches and runs their steps in
a loop in the graph. All of a loop's batches are of one kind (functions.py). One of
another kind, as the last one may be, stops the loop, which hands it over to be run by
itself; then the loop goes on.
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
    """Returns what Keras calls as train_function and test_function.

    Args:
        function: Runs one batch; returns the logs.
        steps: How many batches one call runs, if there are as many.
    """
    several = _Several(function, steps)

    def run(iterator: Any) -> Any:
        spec = getattr(iterator, "element_spec", None)
        if several.takes(iterator, spec):
            with faults.named():
                return several(iterator, spec)
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
        call: Takes an iterator and how many batches to run. Returns how many it ran,
            what the last returned, and an Optional of a batch of another kind.
        misses: How often in a row the first batch was of another kind.
    """

    call: Callable[..., Any]
    misses: int = 0


class _Several:
    """Runs so many batches per call, in a loop in the graph.

    Args:
        function: Runs one batch.
        steps: How many batches one call runs, if there are as many.
    """

    def __init__(self, function: BatchFunction, steps: int) -> None:
        self._function, self._steps = function, steps
        self._key: tuple[Any, Any] = (None, None)

    def takes(self, iterator: Any, spec: Any) -> bool:
        """Whether the batches of an iterator can be run so.

        Args:
            iterator: Keras'.
            spec: Of its batches, if it has one.
        """
        if self._steps == 1 or self._function.eager:
            return False
        return isinstance(iterator, tf.data.Iterator) and is_dense(spec)

    def __call__(self, iterator: Any, spec: Any) -> Any:
        """Runs batches; returns what the last one returned.

        Args:
            iterator: A tf.data.Iterator.
            spec: Of its batches.

        Raises:
            StopIteration: There is none.
        """
        key, loops = self._key_of(spec), self._function.loops
        logs, done = None, 0
        while done < self._steps:
            loop = loops.get(key)
            if loop is None:
                data = _next(iterator)
            else:
                number, own, rest = loop.call(iterator, tf.constant(self._steps - done))
                ran = int(number)
                if ran:
                    logs, loop.misses = own, 0
                done += ran
                if done == self._steps:
                    break
                data = rest.get_value() if rest.has_value() else _END
                loop.misses += data is not _END and not ran
            if data is _END:
                break
            logs, traced = self._function.run(data, spec)
            done += 1
            # The one batch of another kind at the end is no reason for another loop.
            if traced and (key not in loops or (loop and loop.misses > 1)):
                loops[key] = _loop(self._function, traced, iterator)
        if not done:
            raise StopIteration
        return logs

    def _key_of(self, spec: Any) -> Any:
        """Returns what is equal for equal specs."""
        if self._key[0] is not spec:
            leaves = tuple(tf.nest.flatten(spec))
            structure = tf.nest.map_structure(lambda _: 0, spec)
            self._key = (spec, (repr(structure), leaves))
        return self._key[1]


def _loop(function: BatchFunction, traced: Traced, iterator: Any) -> _Loop | None:
    """Returns a loop over what an iterator has of batches that a function takes.

    Args:
        function: Knows the kinds of batches.
        traced: Runs one.
        iterator: Of a dataset, or of another one like it.

    Returns:
        None if there can be none, as a step's results have no fixed shapes.
    """
    structure = tf.nest.map_structure(_spec, traced.function.structured_outputs)
    results = tf.nest.flatten(structure)
    specs = [spec for spec in results if spec is not None]
    if not specs or not all(map(_is_fixed, specs)):
        return None
    spec = iterator.element_spec

    def pull(iterator: Any) -> tuple[Any, tf.Tensor]:
        """Returns the next batch as an Optional, and whether it is one of the loop."""
        with tf.device("CPU:0"):
            batch = iterator.get_next_as_optional()
            fits = tf.cond(
                batch.has_value(),
                lambda: _fits(function, traced.kind, batch.get_value()),
                lambda: tf.constant(False),
            )
        return batch, fits

    @_do_not_convert
    def several(iterator: Any, count: tf.Tensor) -> Any:
        def turn(number: Any, batch: Any, fits: Any, kept: Any) -> Any:
            logs = traced.function(*tf.nest.flatten(batch.get_value()))
            kept = [leaf for leaf in tf.nest.flatten(logs) if leaf is not None]
            # The step is done on all devices before anything else begins.
            with tf.control_dependencies(kept):
                number = number + 1
                batch, fits = tf.cond(
                    number < count,
                    lambda: pull(iterator),
                    lambda: (tf.experimental.Optional.empty(spec), tf.constant(False)),
                )
            return number, batch, fits, kept

        zeros = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
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
    built = tf.function(several).get_concrete_function(iterator, count)
    return _Loop(function.equal_after_errors(built))


def _spec(result: Any) -> Any:
    """Returns the spec of what a traced function returns; None of what is none."""
    if result is None or isinstance(result, tf.TypeSpec):
        return result
    return tf.type_spec_from_value(result)


def _is_fixed(spec: Any) -> bool:
    """Whether zeros can stand in for a result until there is one."""
    plain = type(spec) is tf.TensorSpec and spec.dtype not in (tf.resource, tf.variant)
    return plain and spec.shape.is_fully_defined()


def _fits(function: BatchFunction, kind: str, batch: Any) -> tf.Tensor:
    """Returns whether a batch is of a kind; if its tensors disagree, it is of none."""
    sizes = [tf.shape(leaf)[0] for leaf in tf.nest.flatten(batch) if leaf.shape.rank]
    same = [tf.equal(size, sizes[0]) for size in sizes]
    return tf.reduce_all([function.is_of(kind, sizes[0]), *same])
