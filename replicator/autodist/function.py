# SPDX-License-Identifier: Apache-2.0
"""Runs a function that was written for one device on all replicas.

Callers pass whole batches, which are split along their first axis. For each kind of
arguments the function is traced once (see traces.py).
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator.autodist import traces
from replicator.graph.ir import shapes


class DistributedFunction:
    """A function that `AutoDist.function` runs on all replicas.

    Example:
        >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
        >>> @autodist.function
        ... def squares(x):
        ...     '''Returns the squares, and their mean.'''
        ...     return x**2, tf.reduce_mean(x**2)
        >>> rows, mean = squares(np.float32([1, 2, 4]))
        >>> print(rows.numpy(), float(mean), squares.__name__)
        [ 1.  4. 16.] 7.0 squares

    Args:
        function: The user's function.
        repl: The Replicator that runs it.
        loss: What the user declares losses to be, "mean" or "sum"; None if nothing.
        owner: Returns the object whose method the function is, its first argument.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        repl: Any,
        loss: str | None = None,
        owner: Callable[[], Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._repl, self._loss = function, repl, loss
        self._owner = owner
        self._traces: dict[Hashable, traces.Trace] = {}
        self._methods: dict[int, DistributedFunction] = {}  # by the ids of their owners
        self._kept: Any = None

    def __get__(self, instance: Any, kind: type | None = None) -> DistributedFunction:
        """Returns the method of an object, for a function in the body of a class."""
        if instance is None:
            return self
        key, methods = id(instance), self._methods
        if key not in methods:
            owner = self._reference(instance, lambda _: methods.pop(key, None))
            methods[key] = DistributedFunction(
                self._function, self._repl, self._loss, owner
            )
        method = copy.copy(methods[key])
        method._kept = instance  # which nothing else may keep until the call
        return method

    def _reference(self, instance: Any, when_gone: Callable[[Any], Any]) -> Any:
        try:
            return weakref.ref(instance, when_gone)
        except TypeError as error:
            raise errors.ArgumentError(
                errors.compose(
                    f"{traces.name_of(self._function)} is a method of a "
                    f"{type(instance).__name__}, which has no weak references.",
                    [f"at {errors.user_line()}"],
                    'add "__weakref__" to its __slots__; or decorate a function that '
                    "calls the method.",
                )
            ) from error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on all replicas, each with a part of the examples.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> scaled = autodist.function(lambda x, factor: factor * x)
            >>> print(scaled(np.float32([1, 2, 3]), factor=2.0).numpy())
            [2. 4. 6.]

        Args:
            *args: Arguments of the function. Arrays and tensors of shape [examples,
                ...] are split along their first axis; scalars and all others are passed
                to each replica as they are.
            **kwargs: Keyword arguments, likewise.

        Returns:
            What the function returns for the whole batch: results with a row for each
            example are of shape [examples, ...], in the order of the batch.

        Raises:
            ArgumentError: Arrays differ in their first dimension or are empty; or an
                argument is neither an array nor hashable.
            UnsupportedError: A result of the replicas cannot be combined.
        """
        leaves = self._leaves(args, kwargs)
        array_indices = [k for k, leaf in enumerate(leaves) if _is_array(leaf)]
        tensors = [self._tensor(leaves[k]) for k in array_indices]
        split = [tensor.shape.rank != 0 for tensor in tensors]
        batches = iter(
            _check_sizes(
                [t for t, is_split in zip(tensors, split, strict=True) if is_split]
            )
        )
        tensors = [
            next(batches) if is_split else t
            for t, is_split in zip(tensors, split, strict=True)
        ]
        # Only gradients of replicas without an example need guards; few batches do.
        all_have_some = self._all_have_some(tensors, split)
        key = all_have_some, self._key(args, kwargs, leaves, array_indices, tensors)
        if key not in self._traces:
            signature = traces.Signature(
                (args, kwargs), array_indices, split, all_have_some
            )
            self._traces[key] = traces.Trace(
                self._function, self._repl, signature, self._loss, self._owner
            )
        return self._traces[key](tensors)

    def _all_have_some(
        self, tensors: Sequence[tf.Tensor], split: Sequence[bool]
    ) -> bool:
        """Whether every replica is known to have an example."""
        batches = [t for t, is_split in zip(tensors, split, strict=True) if is_split]
        sizes = [n for n in (shapes.sizes(t)[0] for t in batches) if n is not None]
        return bool(sizes) and min(sizes) >= self._repl.num_replicas

    def _leaves(self, args: Any, kwargs: Any) -> list[Any]:
        try:
            leaves: list[Any] = tf.nest.flatten((args, kwargs))
        except (TypeError, ValueError, RecursionError) as error:
            raise self._argument_error((args, kwargs), error) from error
        return leaves

    def _tensor(self, array: Any) -> tf.Tensor:
        try:
            return tf.convert_to_tensor(array)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise self._argument_error(array, error) from error

    def _argument_error(self, what: Any, error: Exception) -> errors.ReplicatorError:
        return errors.ArgumentError(
            errors.compose(
                f"{traces.name_of(self._function)} cannot be called with "
                f"{errors.shown(what)}: {errors.told(error)}.",
                fix="pass numbers, strings, and arrays and tensors of these.",
            )
        )

    def _key(
        self,
        args: Any,
        kwargs: Any,
        leaves: Sequence[Any],
        array_indices: Sequence[int],
        tensors: Sequence[tf.Tensor],
    ) -> Hashable:
        """Returns a key that is equal for calls which can share a trace."""
        others = [x for k, x in enumerate(leaves) if k not in set(array_indices)]
        specs = [(t.dtype, (shapes.static(t) or ())[1:], t.shape.rank) for t in tensors]
        structure = tf.nest.map_structure(lambda _: 0, (args, kwargs))
        try:
            key = (
                *(repr(structure), tuple(array_indices), tuple(specs)),
                tuple((type(x), x) for x in others),
            )
            hash(key)
        except TypeError:
            raise errors.ArgumentError(
                errors.compose(
                    f"{traces.name_of(self._function)} was given arguments that are "
                    "neither arrays nor hashable: "
                    + ", ".join(errors.shown(x) for x in others if not _hashes(x))
                    + ".",
                    fix="pass arrays, tensors, numbers and strings; refer to other "
                    "objects inside the function.",
                )
            ) from None
        return key


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic | tf.Tensor)


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _check_sizes(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Returns tensors of equally many rows; asserts it where sizes are not static.

    Raises:
        ArgumentError: The numbers of rows differ or are 0, or a rank is unknown.
    """
    static_shapes = [shapes.static(tensor) for tensor in tensors]
    sizes = {None if shape is None else shape[0] for shape in static_shapes}
    if len(sizes) < 2 and not sizes & {0, None}:
        return tensors
    if None in static_shapes or 0 in sizes or len(sizes - {None}) > 1:
        raise errors.ArgumentError(_compose_sizes_differ(static_shapes))
    first, *others = [tf.shape(tensor)[0] for tensor in tensors]
    checks = [
        tf.debugging.assert_equal(first, other, _compose_sizes_differ(static_shapes))
        for other in others
    ]
    with tf.control_dependencies(checks):
        return [tf.identity(tensor) for tensor in tensors]


def _compose_sizes_differ(shapes_known: Sequence[Any]) -> str:
    return errors.compose(
        "the arguments of a function of AutoDist are split along their first axis, "
        f"but their shapes are {shapes_known}.",
        fix="pass the same number of rows in each, at least one; to give every "
        "replica all of a value, refer to it inside the function.",
    )
