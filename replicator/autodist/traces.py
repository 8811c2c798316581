# SPDX-License-Identifier: Apache-2.0
"""Traces a function that was written for one device, for arguments of one kind.

What is traced is the function as it is on one device. The engine of whole-batch
programs (forms/) runs it on the replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist.arguments import Arguments, Signature
from replicator.forms.engine import WholeBatchFunction
from replicator.forms.traced import Made


class Trace:
    """The function, traced for arguments of one kind.

    Args:
        function: The user's function.
        repl: The Replicator that runs it.
        signature: The kind of the arguments.
        made: The variables that the function has made so far.
        owner: Returns the first argument of a method.
        local_statistics: Whether batch normalization uses those of each replica's rows.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        repl: Any,
        signature: Signature,
        made: Made,
        owner: Callable[[], Any] | None,
        local_statistics: bool,
    ) -> None:
        self._signature, self._few = signature, repl.num_replicas
        rows = [0 if has_rows else None for has_rows in signature.have_rows]
        self._split, self._whole = tuple(rows), (None,) * len(rows)

        @_tf.not_converted
        def flat(*tensors: tf.Tensor) -> Any:
            return call(function, owner, *signature.packed(tensors))

        specs = signature.flat_specs
        self._function = WholeBatchFunction(
            flat, repl, specs, made=made, local_statistics=local_statistics
        )

    def __call__(self, arguments: Arguments) -> Any:
        """Runs the function.

        Args:
            arguments: Those of a call.
        """
        tensors, rows = arguments.flat, arguments.rows
        if rows is None and self._few > 1:
            return tf.cond(
                arguments.rows_then() < self._few,
                lambda: self._function.function(self._whole)(*tensors),
                lambda: self._function.function(self._split)(*tensors),
            )
        is_split = self._few > 1 and (rows or 0) >= self._few
        which = self._split if is_split else self._whole
        if tf.executing_eagerly() and not _tf.may_record():
            return self._function.run(which, tensors)
        return self._function.function(which)(*tensors)


def call(
    function: Callable[..., Any],
    owner: Callable[[], Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a user's function through AutoGraph, in a graph for one device."""
    if owner is not None:
        args = (owner(), *args)
    return _tf.call_converted(
        functools.partial(_tf.function_of(function), **kwargs), args
    )


def name_of(function: Any) -> str:
    """Returns the name of a user's function, for messages."""
    return getattr(function, "__name__", type(function).__name__)
