"""A function that was written for one device, called with whole batches.

Its arguments are split along their first axis, and it is a step of its replicas. What
it returns is put together: rows of examples, means of numbers, and what is the same on
all replicas as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import _tf, context, errors
from replicator.graph.ir import shapes
from replicator.inputs.shards import Shard
from replicator.values import PerReplica
from replicator.variables import synchronized

_do_not_convert = tf.autograph.experimental.do_not_convert


class DistributedFunction:
    """What `AutoDist.function` returns.

    Args:
        function: The user's.
        repl: Runs it on its replicas.
    """

    def __init__(self, function: Callable[..., Any], repl: Any) -> None:
        functools.update_wrapper(self, function)
        self._function, self._repl = function, repl
        self._built: dict[Hashable, _Call] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on all replicas, each with a part of the examples.

        Args:
            *args: Arrays and tensors, which are split, and anything else.
            **kwargs: The same.

        Raises:
            ArgumentError: Arrays differ in their first axis, or hold no example.
        """
        leaves = tf.nest.flatten((args, kwargs))
        places = [k for k, leaf in enumerate(leaves) if _is_array(leaf)]
        tensors = [tf.convert_to_tensor(leaves[k]) for k in places]
        split = [tensor.shape.rank != 0 for tensor in tensors]
        _check([t for t, own in zip(tensors, split, strict=True) if own])
        key = self._key(args, kwargs, leaves, places, tensors)
        if key not in self._built:
            call = _Call(self._function, self._repl, (args, kwargs), places, split)
            self._built[key] = call
        return self._built[key](tensors)

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
            key = repr(structure), tuple(kinds), tuple((type(x), x) for x in others)
            hash(key)
        except TypeError:
            raise errors.ArgumentError(
                errors.compose(
                    f"{_name(self._function)} was given what is no array, nor can be "
                    "compared: "
                    + ", ".join(errors.shown(x) for x in others if not _hashes(x))
                    + ".",
                    fix="pass arrays, tensors, numbers and texts; other objects are "
                    "for the function to refer to.",
                )
            ) from None
        return key


class _Call:
    """The function, for arguments of one kind.

    Args:
        function: The user's.
        repl: Runs it.
        arguments: Those of a call.
        places: Which leaves of them are arrays.
        split: Which of these are split.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        repl: Any,
        arguments: Any,
        places: Sequence[int],
        split: Sequence[bool],
    ) -> None:
        self._function, self._repl, self._split = function, repl, split
        self._structure, self._places = arguments, places
        leaves = tf.nest.flatten(arguments)
        self._others = [None if k in places else x for k, x in enumerate(leaves)]
        self._run = tf.function(self._build, reduce_retracing=True, autograph=False)
        self._ready: Any = None
        self._returned: Any = None  # by the function, for the replica traced last

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        if self._ready is None:
            self._ready = self._run.get_concrete_function(
                [
                    tf.TensorSpec([None, *t.shape[1:]] if own else t.shape, t.dtype)
                    for t, own in zip(tensors, self._split, strict=True)
                ]
            )
        return self._ready(*tensors)

    @_do_not_convert
    def _step(self, count: Any, total: Any, tensors: Sequence[tf.Tensor]) -> Any:
        """What each replica does."""
        replica = context.require("a function of AutoDist")
        leaves = list(self._others)
        for k, tensor in zip(self._places, tensors, strict=True):
            leaves[k] = tensor
        args, kwargs = tf.nest.pack_sequence_as(self._structure, leaves)
        shard = Shard(None, count, total) if any(self._split) else None
        replica.synchronizes = True
        with replica.weighing(shard):
            function = _tf.function_of(self._function)
            self._returned = _tf.call_converted(
                functools.partial(function, **kwargs), args
            )
            synchronized.resolve(replica)
            return tf.nest.flatten(self._returned)

    def _build(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Splits the arguments, runs the step and puts the results together."""
        count = self._repl.num_replicas
        parts, counts, total = _parts(tensors, self._split, count)
        own = PerReplica(counts), total, PerReplica(parts)
        returned = self._repl.run(self._step, args=own)
        has_rows = any(self._split)
        made = [_joined(leaf, counts, total, has_rows) for leaf in returned]
        return tf.nest.pack_sequence_as(self._returned, made)


def _parts(
    tensors: Sequence[tf.Tensor], split: Sequence[bool], count: int
) -> tuple[list[list[tf.Tensor]], list[tf.Tensor], tf.Tensor]:
    """Splits tensors; returns the parts, and how many examples each replica has.

    A replica for which there is none is lent the first one, and counts for nothing.
    """
    sizes = [tf.shape(t)[0] for t, own in zip(tensors, split, strict=True) if own]
    total = sizes[0] if sizes else tf.constant(count)
    counts = [(total + count - 1 - r) // count for r in range(count)]
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


def _joined(
    leaf: Any, counts: Sequence[tf.Tensor], total: tf.Tensor, has_rows: bool
) -> Any:
    """Returns a result for all examples."""
    values = list(leaf)
    first = values[0]
    if not isinstance(first, tf.Tensor):
        return first
    if has_rows and first.shape.rank and shapes.sizes(first)[0] is None:
        rows = [
            value[: tf.where(count > 0, tf.shape(value)[0], 0)]
            for value, count in zip(values, counts, strict=True)
        ]
        return tf.concat(rows, 0)
    if first.shape.rank == 0 and (first.dtype.is_floating or first.dtype.is_complex):
        weights = [tf.cast(n / total, first.dtype) for n in counts]
        return tf.add_n(
            [
                tf.where(w == 0, tf.zeros_like(v), v * w)
                for v, w in zip(values, weights, strict=True)
            ]
        )
    text = (
        f"A function of AutoDist returned {first.dtype.name}{first.shape} that differs "
        "between replicas, and is neither a number that has a mean nor has a row for "
        "each example. Fix: return rows, means, or what is the same on all replicas."
    )
    checks = [tf.debugging.assert_equal(first, v, text) for v in values[1:]]
    with tf.control_dependencies([c for c in checks if c is not None]):
        return tf.identity(first)


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


def _check(tensors: Sequence[tf.Tensor]) -> None:
    """Raises ArgumentError unless all tensors have as many rows, and have any."""
    sizes = {shapes.sizes(tensor)[0] for tensor in tensors}
    if len(sizes) > 1 or 0 in sizes:
        raise errors.ArgumentError(
            errors.compose(
                "the arguments of a function of AutoDist are split along their first "
                f"axis, but they are of shapes {[shapes.static(t) for t in tensors]}.",
                fix="pass as many rows of each, one or more; what shall go to each "
                "replica as a whole is for the function to refer to.",
            )
        )
