# SPDX-License-Identifier: Apache-2.0
"""Validates the arguments of `run`, `build` and `initialize`, on every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import arguments, errors
from replicator.inputs import checks, ends
from replicator.primitives import base
from replicator.step.requests import Request
from replicator.values import PerReplica

INPUT_MODES = ("per_replica", "per_worker", "global_batch")
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)


def check(request: Request) -> None:
    """Raises ArgumentError or InputError unless these can form a step; it is cheap."""
    if not callable(request.step_fn):
        raise base.bad_argument(
            "run",
            f"was given {errors.shown(request.step_fn)} as step_fn",
            "pass a function, which is called once per replica.",
        )
    if request.by_value:
        _check_values(request)
    if not arguments.is_choice(request.input_mode, INPUT_MODES):
        raise errors.InputError(
            errors.compose(
                f"input_mode={errors.shown(request.input_mode)} is unknown.",
                fix=f"input_mode is one of {', '.join(INPUT_MODES)}.",
            )
        )
    if not arguments.is_whole(request.steps_per_call, 1):
        raise base.bad_argument(
            "run",
            f"was given steps_per_call={errors.shown(request.steps_per_call)}",
            "steps_per_call is a positive int below 2**31, how many steps one call "
            "runs.",
        )
    if not isinstance(request.args, tuple | list) or type(request.args) is PerReplica:
        raise base.bad_argument(
            "run",
            f"was given args={errors.shown(request.args)}",
            "args is a tuple of arguments for step_fn: args=(x,) for one value.",
        )
    if not arguments.is_choice(request.remainder, ends.REMAINDERS):
        raise base.bad_argument(
            "run",
            f"was given remainder={errors.shown(request.remainder)}",
            f"remainder is one of {', '.join(ends.REMAINDERS)}.",
        )


def _check_values(request: Request) -> None:
    """Raises InputError unless inputs passed by value can feed a step."""
    kind = checks.source_kind(request.inputs)
    if kind == "an iterator" or isinstance(request.inputs, _PLAIN):
        raise errors.InputError(
            errors.compose(
                f"input_fn is {type(request.inputs).__name__} "
                f"{errors.shown(request.inputs)}.",
                fix="pass a tf.data.Dataset, a function that returns one, lambda: ..., "
                "or a nest of tensors or arrays; a number or string to call step_fn "
                "with belongs in args=(...).",
            )
        )
    if request.input_mode == "per_worker":
        raise errors.InputError(
            errors.compose(
                'input_mode="per_worker" deals out the elements of one Dataset; '
                f"input_fn is {type(request.inputs).__name__}.",
                fix='pass a tf.data.Dataset, or use input_mode="global_batch", which '
                "splits tensors over the replicas.",
            )
        )


def check_takes(request: Request, num_args: int) -> None:
    """Raises ArgumentError unless step_fn accepts its arguments.

    Args:
        request: The arguments of the step.
        num_args: The number of `args`.
    """
    step_fn, elements = request.step_fn, int(request.inputs is not None)
    if not arguments.refuses(step_fn, elements + num_args):
        return
    parts = len(checks.required(step_fn)) - num_args
    if elements and parts > 1 and not arguments.refuses(step_fn, parts + num_args):
        return  # it takes the parts of an element as arguments
    count = elements + num_args
    raise errors.ArgumentError(
        errors.compose(
            f"step_fn cannot be called with {count} argument{'s' * (count != 1)}.",
            errors.sites_of("step_fn", step_fn),
            "let step_fn take one argument if there is an input_fn, else none, and one "
            "for each of `args`.",
        )
    )


def arranged(step_fn: Any, element: Any, further: Sequence[Any]) -> list[Any]:
    """Returns the arguments of step_fn: an element or its parts, then further ones.

    Args:
        step_fn: The user's function.
        element: The replica's element.
        further: The arguments after it.

    Raises:
        ArgumentError: step_fn takes more arguments than fit the parts of the element.
    """
    if not arguments.refuses(step_fn, 1 + len(further)):
        return [element, *further]
    is_tuple = isinstance(element, tuple | list)
    if is_tuple and not arguments.refuses(step_fn, len(element) + len(further)):
        return [*element, *further]
    parts = len(checks.required(step_fn)) - len(further)
    description = errors.type_of(element)
    if is_tuple:
        description += f" of {len(element)}"
    elif tf.is_tensor(element):
        description = "one tensor"
    raise errors.ArgumentError(
        errors.compose(
            f"step_fn takes {parts} arguments from each element of its inputs, which "
            f"is {description}.",
            errors.sites_of("step_fn", step_fn),
            f"let the inputs yield tuples of {parts}, as in "
            "tf.data.Dataset.zip(images, labels); or let step_fn take the element as "
            "one argument.",
        )
    )


def check_session(session: Any) -> None:
    """Raises ArgumentError unless inputs can be restarted in this session."""
    graph = getattr(session, "graph", None) if callable(_run_of(session)) else None
    if session is not None and not isinstance(graph, tf.Graph):
        raise base.bad_argument(
            "initialize",
            f"was given {errors.shown(session)}",
            "pass the tf.compat.v1.Session that runs the step, or nothing if the step "
            "runs eagerly.",
        )


def _run_of(session: Any) -> Any:
    return None if tf.is_tensor(session) else getattr(session, "run", None)


def refuse_session(step_fn: Callable[..., Any]) -> None:
    """Refuses to build a step into a plain tf.Graph in between-graph mode.

    Raises:
        ContextError: The step would be built into one.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            return
    raise errors.ContextError(
        errors.compose(
            "a step was built into a tf.Graph, which a session runs; in between-graph "
            "mode, hosts communicate in eager programs only.",
            errors.sites_of("step_fn", step_fn),
            "run the step eagerly or in a tf.function; or run the program in-graph, "
            "which needs no --mode=between.",
        )
    )
