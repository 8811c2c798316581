# SPDX-License-Identifier: Apache-2.0
"""AutoGraph: converts user functions and recognizes converted ones."""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx, converter
from tensorflow.python.autograph.impl import api as autograph_api

from replicator._tf import frames, tracebacks


def call_converted(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls a user's function through AutoGraph, as tf.function does.

    `tf.autograph.to_graph` converts too, but keeps no source map, and TensorFlow's
    wrappers replace the user's exceptions by others; here they pass unchanged, with
    the user's lines as a note: the traceback has those of the converted code.
    """
    # No optional features, as in tf.function: one of them orders ops itself, and would
    # switch off the ordering of the enclosing function.
    options = converter.ConversionOptions(
        recursive=True, user_requested=True, optional_features=()
    )
    with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED, options=options):
        try:
            return autograph_api.converted_call(
                function, tuple(args), None, None, options
            )
        except Exception as error:
            if hasattr(error, "ag_error_metadata"):
                _note_lines(error)
                del error.ag_error_metadata
            raise


def _note_lines(error: Any) -> None:
    """Adds the user's lines on the stack to an error, unless that has been done."""
    lines = [
        f'  File "{frame.filename}", line {frame.lineno}, in '
        f"{frame.function_name or '<lambda>'}\n    "
        + linecache.getline(frame.filename, frame.lineno).strip()
        for frame in reversed(error.ag_error_metadata.translated_stack)
        if frame.is_converted
    ]
    if lines and not frames.lines_in_notes(error):
        error.add_note("\n".join([frames.IN_USER_CODE, *lines]))


class LeftAsItIs:
    """Base of exceptions that pass through converted code unchanged.

    For an exception that leaves a tf.function, AutoGraph raises another one, of the
    same class if it can, whose text begins with the lines on the stack: "in user code",
    and ours among them. The attribute that switches this off has no public name.
    """

    ag_pass_through = True


_Function = TypeVar("_Function", bound=Callable[..., Any])


def not_converted(function: _Function) -> _Function:
    """Wraps a function of ours so that converted code calls it unconverted.

    Like tf.autograph.experimental.do_not_convert. In addition, exceptions that the
    user's code or TensorFlow raises inside it leave an enclosing tf.function unchanged;
    otherwise AutoGraph would put our lines into their text. Their tracebacks are those
    of the user's code; see `tracebacks.shorten`.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _in_function():
                error.ag_pass_through = True  # type: ignore[attr-defined]
            tracebacks.shorten(error)
            raise

    wrapped: _Function = tf.autograph.experimental.do_not_convert(call)
    return wrapped


def _in_function() -> bool:
    """Whether a tf.function is being traced."""
    if tf.executing_eagerly():
        return False
    return bool(tf.compat.v1.get_default_graph().building_function)


def function_of(candidate: Any) -> Callable[..., Any]:
    """Returns the Python function inside a tf.function, or the candidate itself."""
    if isinstance(candidate, tf.types.experimental.PolymorphicFunction):
        return candidate.python_function
    return candidate
