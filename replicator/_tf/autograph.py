# SPDX-License-Identifier: Apache-2.0
"""AutoGraph: converts the user's functions, and recognizes what is converted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx, converter
from tensorflow.python.autograph.core import function_wrappers as _wrappers
from tensorflow.python.autograph.impl import api as autograph_api


def call_converted(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls a user's function through autograph, as tf.function does.

    `tf.autograph.to_graph` converts too, but keeps no source map, and TensorFlow's
    wrappers replace the user's exceptions by others; here they pass unchanged.
    """
    # Without optional features, as tf.function: one of them orders ops by itself, and
    # would switch off the order of the function around.
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
                del error.ag_error_metadata
            raise


class LeftAsItIs:
    """A base of exceptions that pass converted code as they are.

    AutoGraph raises another one in place of an exception that leaves a tf.function, of
    the same class if it can, whose text begins with the lines on the stack: "in user
    code", and ours among them. There is no public name for what tells it not to.
    """

    ag_pass_through = True


def not_converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of ours as converted code calls it: as it is.

    As tf.autograph.experimental.do_not_convert does, and what the user's own code or
    TensorFlow raises in it passes a tf.function around it as it is, too: else AutoGraph
    would put our lines into its text.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _in_function():
                error.ag_pass_through = True  # type: ignore[attr-defined]
            raise

    return tf.autograph.experimental.do_not_convert(call)


def _in_function() -> bool:
    """Whether a tf.function is being traced."""
    if tf.executing_eagerly():
        return False
    return bool(tf.compat.v1.get_default_graph().building_function)


def same_conversion(one: Any, two: Any) -> bool:
    """Whether two objects are what AutoGraph tells two calls of one function by.

    Lambdas in converted code refer to it.
    """
    scopes = (
        isinstance(one, _wrappers.FunctionScope),
        isinstance(two, _wrappers.FunctionScope),
    )
    return all(scopes) and (one.name, one.callopts.as_tuple()) == (
        two.name,
        two.callopts.as_tuple(),
    )


def function_of(candidate: Any) -> Callable[..., Any]:
    """Returns the Python function inside a tf.function, or the candidate itself."""
    if isinstance(candidate, tf.types.experimental.PolymorphicFunction):
        return candidate.python_function
    return candidate
