# SPDX-License-Identifier: Apache-2.0
"""Runs a function that was written for one device on all replicas.

Callers pass whole batches. They are split along their first axis, and the function
becomes a step of the replicas. Its graph tells how losses and results depend on the
examples (see examples.py), and so how gradients are weighted and results combined.
Where nothing makes these equal those of one device, each replica computes the whole
batch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from replicator import _tf, context, errors
from replicator.autodist import examples, refusals, results
from replicator.costs import cost
from replicator.graph.ir import shapes
from replicator.graph.order import ordering
from replicator.inputs import shards
from replicator.values import PerReplica
from replicator.variables import synchronized


class DistributedFunction:
    """A function that `AutoDist.function` runs on all replicas.

    Args:
        function: The user's function.
        repl: The Replicator that runs it.
        loss: What the user declares losses to be, "mean" or "sum"; None if nothing.
    """

    def __init__(
        self, function: Callable[..., Any], repl: Any, loss: str | None = None
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._repl, self._loss = function, repl, loss
        self._built: dict[Hashable, _Call] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on all replicas, each with a part of the examples.

        Args:
            *args: Arguments of the function. Arrays and tensors that are no scalars
                are split; all others are passed to each replica as they are.
            **kwargs: Keyword arguments, likewise.

        Raises:
            ArgumentError: Arrays differ in their first dimension or are empty.
        """
        leaves = self._leaves(args, kwargs)
        array_indices = [k for k, leaf in enumerate(leaves) if _is_array(leaf)]
        tensors = [self._tensor(leaves[k]) for k in array_indices]
        split = [tensor.shape.rank != 0 for tensor in tensors]
        batches = iter(
            _checked(
                [t for t, is_split in zip(tensors, split, strict=True) if is_split]
            )
        )
        tensors = [
            next(batches) if is_split else t
            for t, is_split in zip(tensors, split, strict=True)
        ]
        # Only gradients of replicas without an example need guards; few batches do.
        enough = self._are_enough(tensors, split)
        key = enough, self._key(args, kwargs, leaves, array_indices, tensors)
        if key not in self._built:
            arguments = _Arguments((args, kwargs), array_indices, split, enough)
            self._built[key] = _Call(self._function, self._repl, arguments, self._loss)
        return self._built[key](tensors)

    def _are_enough(self, tensors: Sequence[tf.Tensor], split: Sequence[bool]) -> bool:
        """Whether every replica is known to have an example."""
        batches = [t for t, is_split in zip(tensors, split, strict=True) if is_split]
        sizes = [n for n in (shapes.sizes(t)[0] for t in batches) if n is not None]
        return bool(sizes) and min(sizes) >= self._repl.num_replicas

    def _leaves(self, args: Any, kwargs: Any) -> list[Any]:
        try:
            leaves: list[Any] = tf.nest.flatten((args, kwargs))
        except (TypeError, ValueError, RecursionError) as error:
            raise self._unfit((args, kwargs), error) from error
        return leaves

    def _tensor(self, array: Any) -> tf.Tensor:
        try:
            return tf.convert_to_tensor(array)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise self._unfit(array, error) from error

    def _unfit(self, what: Any, error: Exception) -> errors.ReplicatorError:
        return errors.ArgumentError(
            errors.compose(
                f"{_name(self._function)} cannot be called with {errors.shown(what)}: "
                f"{errors.told(error)}.",
                fix="pass arrays and tensors of numbers or texts, numbers and texts.",
            )
        )

    def _key(
        self,
        args: Any,
        kwargs: Any,
        leaves: Sequence[Any],
        places: Sequence[int],
        tensors: Sequence[tf.Tensor],
    ) -> Hashable:
        """Returns a key that is equal for calls which can share a trace."""
        other_leaves = [leaf for k, leaf in enumerate(leaves) if k not in set(places)]
        specs = [(t.dtype, tuple(t.shape[1:]), t.shape.rank) for t in tensors]
        structure = tf.nest.map_structure(lambda _: 0, (args, kwargs))
        try:
            key = (
                *(repr(structure), tuple(places), tuple(specs)),
                tuple((type(x), x) for x in other_leaves),
            )
            hash(key)
        except TypeError:
            raise errors.ArgumentError(
                errors.compose(
                    f"{_name(self._function)} was given what is no array, nor can be "
                    "compared: "
                    + ", ".join(errors.shown(x) for x in other_leaves if not _hashes(x))
                    + ".",
                    fix="pass arrays, tensors, numbers and texts; other objects are "
                    "for the function to refer to.",
                )
            ) from None
        return key


class _Given(threading.local):
    """The tensors that the current call of each thread passes."""

    tensors: Sequence[tf.Tensor] = ()


class _Arguments(NamedTuple):
    """Properties of the arguments of all calls that share a trace.

    Attributes:
        structure: The arguments of one such call.
        places: The indices of those leaves that are arrays.
        rows: For each array: whether its rows are examples.
        enough: Whether every replica is known to have an example.
    """

    structure: Any
    places: Sequence[int]
    rows: Sequence[bool]
    enough: bool


class _Call:
    """The function, traced for arguments of one kind.

    Args:
        function: The user's function.
        repl: The Replicator that runs it.
        arguments: The kind of the arguments.
        loss: What the user declares losses to be; None if nothing.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        repl: Any,
        arguments: _Arguments,
        loss: str | None,
    ) -> None:
        self._function, self._repl, self._arguments = function, repl, arguments
        self._loss = loss
        self._split = arguments.rows  # all False if the batch cannot be split
        array_indices = arguments.places
        leaves = tf.nest.flatten(arguments.structure)
        self._others = [None if k in array_indices else x for k, x in enumerate(leaves)]
        self._traced = tf.function(self._build, reduce_retracing=True, autograph=False)
        self._ready: Any = None  # its concrete function
        self._run: Callable[[], Any] | None = None  # for calls that no tape records
        self._current, self._lock = _Given(), threading.RLock()
        self._returned: Any = None  # on the replica traced last
        self._results: list[results.Result] = []  # one for each leaf of that

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        if tf.executing_eagerly() and not _tf.may_record():
            previous, self._current.tensors = self._current.tensors, tensors
            try:
                with self._lock:
                    if self._run is None:
                        self._run = self._quick(tensors)
                return self._run()
            finally:
                self._current.tensors = previous
        if self._ready is None:
            self._ready = self._traceable(
                lambda: self._traced.get_concrete_function(self._specs(tensors))
            )
        return self._ready(*tensors)

    def _traceable(self, trace: Callable[[], Any]) -> Any:
        """Returns a trace; without splitting the batch if it cannot be split.

        Raises:
            UnsupportedError: Neither trace succeeds; the error is that of the first.
        """
        try:
            return trace()
        except errors.UnsupportedError as error:
            if not any(self._split):
                raise
            self._split = [False] * len(self._arguments.rows)
            try:
                function = trace()
            except errors.ReplicatorError:
                self._split = self._arguments.rows
                raise error from None
            if self._repl.num_replicas > 1:
                name = _name(self._function)
                logging.warning("%s", refusals.unsplit(f"function {name}", error))
            return function

    def _specs(self, tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
        """Returns specs that the tensors of all calls match."""
        return [
            tf.TensorSpec([None, *t.shape[1:]] if has_rows else t.shape, t.dtype)
            for t, has_rows in zip(tensors, self._arguments.rows, strict=True)
        ]

    def _quick(self, tensors: Sequence[tf.Tensor]) -> Callable[[], Any]:
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

        function = self._traceable(
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
        leaves = list(self._others)
        for k, tensor in zip(self._arguments.places, tensors, strict=True):
            leaves[k] = tensor
        args, kwargs = tf.nest.pack_sequence_as(self._arguments.structure, leaves)
        batches = [
            t for t, is_split in zip(tensors, self._split, strict=True) if is_split
        ]
        shard = shards.Shard(None, count, total) if batches else None
        enough = self._arguments.enough
        replica_examples = examples.Examples(replica, batches, self._loss, enough)
        replica.synchronizes, replica.agrees = (
            replica_examples.weighed,
            replica_examples.agreed,
        )
        replica.takes = lambda value: tf.where(is_first, value, tf.zeros_like(value))
        with replica.weighing(shard):
            function = _tf.function_of(self._function)
            self._returned = _tf.call_converted(
                functools.partial(function, **kwargs), args
            )
            replica_examples.go_on(tf.compat.v1.get_default_graph())
            replica_examples.check()
            synchronized.resolve(replica)
            leaves_returned = tf.nest.flatten(self._returned)
            self._results = results.look(leaves_returned, replica_examples)
            return [*leaves_returned, *results.needed(self._results)]

    def _build(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Splits the arguments, runs the step and combines the results."""
        count = self._repl.num_replicas
        parts, counts, total = _parts(tensors, self._split, count)
        is_first = PerReplica([tf.constant(r == 0) for r in range(count)])
        step_args = PerReplica(counts), total, is_first, PerReplica(parts)
        returned = self._repl.run(self._step, args=step_args)
        leaves = results.joined(self._results, returned, counts, any(self._split))
        return tf.nest.pack_sequence_as(self._returned, leaves)


def _parts(
    tensors: Sequence[tf.Tensor], split: Sequence[bool], count: int
) -> tuple[list[list[tf.Tensor]], list[tf.Tensor], tf.Tensor]:
    """Splits tensors; returns each replica's parts, its number of examples, their sum.

    A replica without an example is lent the first one, and has weight zero.
    """
    sizes = [
        tf.shape(t)[0] for t, is_split in zip(tensors, split, strict=True) if is_split
    ]
    total = sizes[0] if sizes else tf.constant(count)
    counts = [shards.count(total, r, count) for r in range(count)]
    parts, begin = [], tf.constant(0)
    for num_examples in counts:
        start = tf.where(num_examples > 0, begin, 0)
        end = start + tf.maximum(num_examples, 1)
        parts.append(
            [
                tensor[start:end] if is_split else tensor
                for tensor, is_split in zip(tensors, split, strict=True)
            ]
        )
        begin += num_examples
    return parts, counts, total


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic | tf.Tensor)


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _checked(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Returns tensors of equally many rows; asserts it where sizes are not static.

    Raises:
        ArgumentError: The numbers of rows differ or are 0, or a rank is unknown.
    """
    static_shapes = [shapes.static(tensor) for tensor in tensors]
    sizes = {None if shape is None else shape[0] for shape in static_shapes}
    if len(sizes) < 2 and not sizes & {0, None}:
        return tensors
    if None in static_shapes or 0 in sizes or len(sizes - {None}) > 1:
        raise errors.ArgumentError(_compose_unlike(static_shapes))
    first, *others = [tf.shape(tensor)[0] for tensor in tensors]
    checks = [
        tf.debugging.assert_equal(first, other, _compose_unlike(static_shapes))
        for other in others
    ]
    with tf.control_dependencies(checks):
        return [tf.identity(tensor) for tensor in tensors]


def _compose_unlike(shapes_known: Sequence[Any]) -> str:
    return errors.compose(
        "the arguments of a function of AutoDist are split along their first axis, "
        f"but they are of shapes {shapes_known}.",
        fix="pass as many rows of each, one or more; what shall go to each replica as "
        "a whole is for the function to refer to.",
    )
