# SPDX-License-Identifier: Apache-2.0
"""A function that was written for one device, called with whole batches.

Its arguments are split along their first axis, and it is a step of its replicas. What
it differentiates and what it returns is looked at in the graph that it builds, see
examples.py: gradients weigh what they have to, and results are put together. Where
nothing makes these equal those of one device, each replica computes the whole batch.
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
    """What `AutoDist.function` returns.

    Args:
        function: The user's.
        repl: Runs it on its replicas.
        loss: What the user says that losses are, "mean" or "sum", if anything.
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
            *args: Arrays and tensors, which are split, and anything else.
            **kwargs: The same.

        Raises:
            ArgumentError: Arrays differ in their first axis, or hold no example.
        """
        leaves = self._leaves(args, kwargs)
        places = [k for k, leaf in enumerate(leaves) if _is_array(leaf)]
        tensors = [self._tensor(leaves[k]) for k in places]
        split = [tensor.shape.rank != 0 for tensor in tensors]
        rows = iter(_checked([t for t, own in zip(tensors, split, strict=True) if own]))
        tensors = [
            next(rows) if own else t for t, own in zip(tensors, split, strict=True)
        ]
        # Gradients of replicas without an example take guards; few batches need them.
        enough = self._are_enough(tensors, split)
        key = enough, self._key(args, kwargs, leaves, places, tensors)
        if key not in self._built:
            arguments = _Arguments((args, kwargs), places, split, enough)
            self._built[key] = _Call(self._function, self._repl, arguments, self._loss)
        return self._built[key](tensors)

    def _are_enough(self, tensors: Sequence[tf.Tensor], split: Sequence[bool]) -> bool:
        """Whether there is known to be an example for every replica."""
        parts = [t for t, own in zip(tensors, split, strict=True) if own]
        known = [n for n in (shapes.sizes(t)[0] for t in parts) if n is not None]
        return bool(known) and min(known) >= self._repl.num_replicas

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
                fix="pass numbers, strings, and arrays and tensors of these.",
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
        """Returns what is equal for calls that one trace serves."""
        others = [leaf for k, leaf in enumerate(leaves) if k not in set(places)]
        kinds = [(t.dtype, tuple(t.shape[1:]), t.shape.rank) for t in tensors]
        structure = tf.nest.map_structure(lambda _: 0, (args, kwargs))
        try:
            key = (
                *(repr(structure), tuple(places), tuple(kinds)),
                tuple((type(x), x) for x in others),
            )
            hash(key)
        except TypeError:
            raise errors.ArgumentError(
                errors.compose(
                    f"{_name(self._function)} was given arguments that are neither "
                    "arrays nor hashable: "
                    + ", ".join(errors.shown(x) for x in others if not _hashes(x))
                    + ".",
                    fix="pass arrays, tensors, numbers and strings; refer to other "
                    "objects inside the function.",
                )
            ) from None
        return key


class _Given(threading.local):
    """What a thread's call is given."""

    tensors: Sequence[tf.Tensor] = ()


class _Arguments(NamedTuple):
    """What calls have in common that one trace serves.

    Attributes:
        structure: The arguments of one of them.
        places: Which leaves of these are arrays.
        rows: Which of the arrays have examples.
        enough: Whether there is known to be an example for every replica.
    """

    structure: Any
    places: Sequence[int]
    rows: Sequence[bool]
    enough: bool


class _Call:
    """The function, for arguments of one kind.

    Args:
        function: The user's.
        repl: Runs it.
        arguments: What is known of its arguments.
        loss: What the user says that losses are, if anything.
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
        self._split = arguments.rows  # what is split: nothing, if need be
        places = arguments.places
        leaves = tf.nest.flatten(arguments.structure)
        self._others = [None if k in places else x for k, x in enumerate(leaves)]
        self._traced = tf.function(self._build, reduce_retracing=True, autograph=False)
        self._ready: Any = None  # `_traced`, once it is
        self._run: Callable[[], Any] | None = None  # where nothing records
        self._current, self._lock = _Given(), threading.RLock()
        self._returned: Any = None  # by the function, for the replica traced last
        self._results: list[results.Result] = []  # what the leaves of that are

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        if tf.executing_eagerly() and not _tf.may_record():
            before, self._current.tensors = self._current.tensors, tensors
            try:
                with self._lock:
                    if self._run is None:
                        self._run = self._quick(tensors)
                return self._run()
            finally:
                self._current.tensors = before
        if self._ready is None:
            self._ready = self._traceable(
                lambda: self._traced.get_concrete_function(self._specs(tensors))
            )
        return self._ready(*tensors)

    def _traceable(self, trace: Callable[[], Any]) -> Any:
        """Returns a trace; one that splits nothing if the examples cannot be split.

        Raises:
            UnsupportedError: Nor can that be traced; the error is that of the first.
        """
        try:
            return trace()
        except errors.UnsupportedError as error:
            if not any(self._split):
                raise
            self._split = [False] * len(self._arguments.rows)
            try:
                made = trace()
            except errors.ReplicatorError:
                self._split = self._arguments.rows
                raise error from None
            if self._repl.num_replicas > 1:
                name = _name(self._function)
                logging.warning("%s", refusals.unsplit(f"function {name}", error))
            return made

    def _specs(self, tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
        """Returns what is alike for all calls."""
        return [
            tf.TensorSpec([None, *t.shape[1:]] if own else t.shape, t.dtype)
            for t, own in zip(tensors, self._arguments.rows, strict=True)
        ]

    def _quick(self, tensors: Sequence[tf.Tensor]) -> Callable[[], Any]:
        """Traces it as a step is traced; returns what runs it with what is given.

        In less time than a tf.function takes, which tapes could differentiate.
        """

        def given(k: int) -> tf.Tensor:
            return self._current.tensors[k]

        def build() -> Any:
            return self._build(
                [
                    _tf.capture_at_call(functools.partial(given, k), spec)
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
        """What each replica does."""
        replica = context.require("a function of AutoDist")
        leaves = list(self._others)
        for k, tensor in zip(self._arguments.places, tensors, strict=True):
            leaves[k] = tensor
        args, kwargs = tf.nest.pack_sequence_as(self._arguments.structure, leaves)
        given = [t for t, own in zip(tensors, self._split, strict=True) if own]
        shard = shards.Shard(None, count, total) if given else None
        enough = self._arguments.enough
        own = examples.Examples(replica, given, self._loss, enough)
        replica.synchronizes, replica.agrees = own.weighed, own.agreed
        replica.takes = lambda value: tf.where(is_first, value, tf.zeros_like(value))
        with replica.weighing(shard):
            function = _tf.function_of(self._function)
            self._returned = _tf.call_converted(
                functools.partial(function, **kwargs), args
            )
            own.go_on(tf.compat.v1.get_default_graph())
            own.check()
            synchronized.resolve(replica)
            flat = tf.nest.flatten(self._returned)
            self._results = results.look(flat, own)
            return [*flat, *results.needed(self._results)]

    def _build(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Splits the arguments, runs the step and puts the results together."""
        count = self._repl.num_replicas
        parts, counts, total = _parts(tensors, self._split, count)
        first = PerReplica([tf.constant(r == 0) for r in range(count)])
        own = PerReplica(counts), total, first, PerReplica(parts)
        returned = self._repl.run(self._step, args=own)
        made = results.joined(self._results, returned, counts, any(self._split))
        return tf.nest.pack_sequence_as(self._returned, made)


def _parts(
    tensors: Sequence[tf.Tensor], split: Sequence[bool], count: int
) -> tuple[list[list[tf.Tensor]], list[tf.Tensor], tf.Tensor]:
    """Splits tensors; returns the parts, and how many examples each replica has.

    A replica for which there is none is lent the first one, and counts for nothing.
    """
    sizes = [tf.shape(t)[0] for t, own in zip(tensors, split, strict=True) if own]
    total = sizes[0] if sizes else tf.constant(count)
    counts = [shards.count(total, r, count) for r in range(count)]
    parts, begin = [], tf.constant(0)
    for own_count in counts:
        start = tf.where(own_count > 0, begin, 0)
        end = start + tf.maximum(own_count, 1)
        parts.append(
            [
                tensor[start:end] if own else tensor
                for tensor, own in zip(tensors, split, strict=True)
            ]
        )
        begin += own_count
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
    """Returns tensors, all of which have as many rows; where not known, it is asserted.

    Raises:
        ArgumentError: They have not, or none, or their rank is unknown.
    """
    known = [shapes.static(tensor) for tensor in tensors]
    sizes = {None if shape is None else shape[0] for shape in known}
    if len(sizes) < 2 and not sizes & {0, None}:
        return tensors
    if None in known or 0 in sizes or len(sizes - {None}) > 1:
        raise errors.ArgumentError(_compose_unlike(known))
    first, *others = [tf.shape(tensor)[0] for tensor in tensors]
    checks = [
        tf.debugging.assert_equal(first, one, _compose_unlike(known)) for one in others
    ]
    with tf.control_dependencies(checks):
        return [tf.identity(tensor) for tensor in tensors]


def _compose_unlike(shapes_known: Sequence[Any]) -> str:
    return errors.compose(
        "the arguments of a function of AutoDist are split along their first axis, "
        f"but their shapes are {shapes_known}.",
        fix="pass the same number of rows in each, at least one; to give every "
        "replica all of a value, refer to it inside the function.",
    )
