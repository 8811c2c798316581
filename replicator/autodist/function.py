# SPDX-License-Identifier: Apache-2.0
"""Runs a function that was written for one device on all replicas.

Callers pass whole batches, which are split along their first axis. The function is
traced once for each kind of arguments (see traces.py), for batches of all sizes; and
once more if other sizes vary, as the lengths of sequences do.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from absl import logging

from replicator import _tf, errors
from replicator.autodist import traces
from replicator.autodist.arguments import Arguments
from replicator.forms.traced import ByShape, Made, Specs
from replicator.variables import single_device

_MANY = 5  # traces for Python numbers


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
        owner: Returns the object whose method the function is, its first argument.
        declared: Specs of the positional arguments, if they are declared.
        local_statistics: Whether batch normalization uses those of each replica's rows.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        repl: Any,
        owner: Callable[[], Any] | None = None,
        declared: Specs | None = None,
        local_statistics: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._repl, self._owner = function, repl, owner
        self._declared, self._local_statistics = declared, local_statistics
        self._kinds: dict[Hashable, _Kind] = {}
        self._warns, self._lock, self._made = True, threading.RLock(), Made()
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
                *(self._function, self._repl, owner),
                *(self._declared, self._local_statistics),
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

    @_tf.not_converted
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
            ArgumentError: Arrays differ in their first dimension or are empty; an
                argument is neither an array nor hashable, or not as `input_signature`
                of AutoDist.function declares it.
        """
        if single_device.view() is not None:  # a part of another function
            return traces.call(self._function, self._owner, args, kwargs)
        name = traces.name_of(self._function)
        arguments = Arguments(name, args, kwargs, self._declared)
        kind = self._kinds.get(arguments.kind)
        trace = None if kind is None else kind.by_shapes.get(arguments.shapes)
        if trace is None:
            with self._lock:
                trace = self._trace(arguments)
        return trace(arguments)

    def _trace(self, arguments: Arguments) -> traces.Trace:
        """Returns a trace for these and similar arguments."""
        if arguments.kind not in self._kinds:
            self._kinds[arguments.kind] = _Kind(arguments.but_numbers)
            self._warn_of_numbers(arguments)
        kind = self._kinds[arguments.kind]

        def trace(specs: Specs) -> traces.Trace:
            signature = arguments.signature(specs)
            return traces.Trace(
                *(self._function, self._repl, signature),
                *(self._made, self._owner, self._local_statistics),
            )

        found = kind.by_specs.get(arguments.specs, trace)
        kind.by_shapes[arguments.shapes] = found
        return found

    def _warn_of_numbers(self, arguments: Arguments) -> None:
        """Warns of traces of which there is one for each Python number."""
        if not arguments.numbers or not self._warns:
            return
        same = [k.but_numbers == arguments.but_numbers for k in self._kinds.values()]
        if sum(same) == _MANY:
            self._warns = False
            logging.warning(
                "%s",
                errors.compose(
                    f"{traces.name_of(self._function)} was traced {_MANY} times, for "
                    f"as many Python numbers: {arguments.numbers} now. Each trace "
                    "takes time and memory.",
                    [f"at {errors.user_line()}"],
                    "pass numbers that vary as tensors or NumPy scalars: "
                    "np.float32(0.1).",
                ),
            )


@dataclasses.dataclass
class _Kind:
    """The traces for arguments of one kind.

    Attributes:
        but_numbers: The kind, but for Python numbers.
        by_specs: The traces, by the specs of arguments.
        by_shapes: Those that were found for shapes.
    """

    but_numbers: Hashable
    by_specs: ByShape[traces.Trace] = dataclasses.field(default_factory=ByShape)
    by_shapes: dict[Hashable, traces.Trace] = dataclasses.field(default_factory=dict)
