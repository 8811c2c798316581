# SPDX-License-Identifier: Apache-2.0
"""Runs a function that was written for one device on all replicas.

Callers pass whole batches, which are split along their first axis. The function is
traced once for each kind of arguments (see arguments.py), for batches of all sizes; and
once more if other sizes vary, as the lengths of sequences do.
"""

from __future__ import annotations

import collections
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from absl import logging

from replicator import errors
from replicator._tf import autograph
from replicator.autodist.arguments import Arguments
from replicator.forms.engine import WholeBatchFunction
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
    """

    def __init__(
        self,
        function: Callable[..., Any],
        repl: Any,
        owner: Callable[[], Any] | None = None,
        declared: Specs | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._repl = function, repl
        self._owner, self._declared = owner, declared
        # By kinds of arguments.
        self._traces: dict[Hashable, ByShape[WholeBatchFunction]] = {}
        self._found: dict[Hashable, WholeBatchFunction] = {}  # by kinds and shapes
        self._lock, self._made = threading.RLock(), Made()
        self._warns, self._counts = True, collections.Counter[Hashable]()
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
                self._function, self._repl, owner, self._declared
            )
        method = copy.copy(methods[key])
        method._kept = instance  # which nothing else may keep until the call
        return method

    def _reference(self, instance: Any, when_gone: Callable[[Any], Any]) -> Any:
        try:
            return weakref.ref(instance, when_gone)
        except TypeError as error:
            raise errors.ArgumentError(
                f"{_name_of(self._function)} is a method of a "
                f"{type(instance).__name__}, which has no weak references.",
                fix='add "__weakref__" to its __slots__; or decorate a function that '
                "calls the method.",
            ) from error

    @autograph.not_converted
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
            return _called(self._function, self._owner, args, kwargs)
        arguments = Arguments(_name_of(self._function), args, kwargs, self._declared)
        trace = self._found.get(arguments.key)
        if trace is None:
            with self._lock:
                trace = self._found[arguments.key] = self._trace(arguments)
        return trace(*arguments.flat)

    def _trace(self, arguments: Arguments) -> WholeBatchFunction:
        """Returns a trace for these and similar arguments."""
        if arguments.kind not in self._traces:
            self._warn_of_numbers(arguments)

        def trace(specs: Specs) -> WholeBatchFunction:
            call = functools.partial(_called, self._function, self._owner)
            return WholeBatchFunction(
                arguments.caller(call), self._repl, specs, made=self._made
            )

        traces = self._traces.setdefault(arguments.kind, ByShape())
        return traces.get(arguments.specs, trace)

    def _warn_of_numbers(self, arguments: Arguments) -> None:
        """Warns of traces of which there is one for each Python number."""
        if not arguments.numbers:
            return
        self._counts[arguments.but_numbers] += 1
        if self._counts[arguments.but_numbers] == _MANY and self._warns:
            self._warns = False
            logging.warning(
                "%s",
                errors.compose(
                    f"{_name_of(self._function)} was traced {_MANY} times, for "
                    f"as many Python numbers: {arguments.numbers} now. Each trace "
                    "takes time and memory.",
                    [f"at {errors.user_line()}"],
                    "pass numbers that vary as tensors or NumPy scalars: "
                    "np.float32(0.1).",
                ),
            )


def _called(
    function: Callable[..., Any],
    owner: Callable[[], Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a user's function through AutoGraph, in a graph for one device."""
    if owner is not None:
        args = (owner(), *args)
    return autograph.call_converted(
        functools.partial(autograph.function_of(function), **kwargs), args
    )


def _name_of(function: Any) -> str:
    """Returns the name of a user's function, for messages."""
    return getattr(function, "__name__", type(function).__name__)
