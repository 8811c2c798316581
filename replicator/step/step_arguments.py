# SPDX-License-Identifier: Apache-2.0
"""Validates the arguments of `run`, `build` and `initialize`, on every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter
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
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def check(request: Request) -> None:
    """Raises ArgumentError or InputError unless these can form a step; it is cheap."""
    if not callable(request.step_fn):
        raise base.bad_argument(
            "run",
            f"was given {errors.repr_of(request.step_fn)} as step_fn",
            "pass a function, which is called once per replica.",
        )
    if not arguments.is_choice(request.input_mode, INPUT_MODES):
        if not isinstance(request.input_mode, str | None):
            raise _misplaced("input_mode", request.input_mode, "a string")
        raise errors.InputError(
            f"input_mode={errors.repr_of(request.input_mode)} is unknown.",
            fix=f"input_mode is one of {', '.join(INPUT_MODES)}.",
        )
    if request.by_value:
        _check_values(request)
    no_source = request.inputs is None and request.args
    if no_source and request.input_mode == "global_batch":
        raise errors.InputError(
            'input_mode="global_batch" splits the elements of input_fn, and there '
            "is none; of args, each replica gets all.",
            fix="pass what is to be split as input_fn: repl.run(step_fn, (x, y), "
            'input_mode="global_batch").',
        )
    if not arguments.is_whole(request.steps_per_call, 1):
        if not isinstance(request.steps_per_call, (*_PLAIN, type(None))):
            raise _misplaced("steps_per_call", request.steps_per_call, "a positive int")
        raise base.bad_argument(
            "run",
            f"was given steps_per_call={errors.repr_of(request.steps_per_call)}",
            "steps_per_call is a positive int below 2**31, how many steps one call "
            "runs.",
        )
    if not isinstance(request.args, tuple | list) or type(request.args) is PerReplica:
        raise base.bad_argument(
            "run",
            f"was given args={errors.repr_of(request.args)}",
            "args is a tuple of arguments for step_fn: args=(x,) for one value.",
        )
    if not arguments.is_choice(request.remainder, ends.REMAINDERS):
        raise base.bad_argument(
            "run",
            f"was given remainder={errors.repr_of(request.remainder)}",
            f"remainder is one of {', '.join(ends.REMAINDERS)}.",
        )


def _misplaced(name: str, value: Any, meaning: str) -> errors.InputError:
    """Returns the error for data in place of a setting, as in run(step_fn, x, y)."""
    return errors.InputError(
        f"run was given {errors.type_of(value)} as {name}, which is {meaning}.",
        fix="pass data as one tuple, repl.run(step_fn, (x, y)), or as one Dataset of "
        "tuples; step_fn(x, y) takes the parts. What each replica is to get as a "
        "whole, a learning rate say, belongs in args=(rate,).",
    )


def _check_values(request: Request) -> None:
    """Raises InputError unless inputs passed by value can feed a step."""
    kind = checks.source_kind(request.inputs)
    if kind == "an iterator" or isinstance(request.inputs, _PLAIN):
        raise errors.InputError(
            f"input_fn is {type(request.inputs).__name__} "
            f"{errors.repr_of(request.inputs)}.",
            fix="pass a tf.data.Dataset, a function that returns one, lambda: ..., or "
            "a nest of tensors or arrays; a number or string to call step_fn with "
            "belongs in args=(...).",
        )
    if request.input_mode == "per_worker":
        raise errors.InputError(
            'input_mode="per_worker" deals out the elements of one Dataset; '
            f"input_fn is {type(request.inputs).__name__}.",
            fix='pass a tf.data.Dataset, or use input_mode="global_batch", which '
            "splits tensors over the replicas.",
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
        f"step_fn cannot be called with {count} argument{'s' * (count != 1)}.",
        errors.sites_of("step_fn", step_fn),
        "let step_fn take one argument if there is an input_fn, else none, and one for "
        "each of `args`.",
    )


def arranged(step_fn: Any, element: Any, extra_args: Sequence[Any]) -> list[Any]:
    """Returns the arguments of step_fn: an element or its parts, then extra ones.

    Args:
        step_fn: The user's function.
        element: The replica's element.
        extra_args: The arguments after it.

    Raises:
        ArgumentError: step_fn takes more arguments than fit the parts of the element,
            or fewer.
    """
    is_tuple = isinstance(element, tuple | list)
    if arguments.refuses(step_fn, 1 + len(extra_args)):
        if is_tuple and not arguments.refuses(step_fn, len(element) + len(extra_args)):
            return [*element, *extra_args]
        num_parts = len(checks.required(step_fn)) - len(extra_args)
    else:
        num_parts = _most_parts(step_fn, len(extra_args))
        if type(element) not in (tuple, list) or num_parts == 1:
            return [element, *extra_args]
        if len(element) <= num_parts:
            return [*element, *extra_args]
    description = errors.type_of(element)
    if is_tuple:
        description += f" of {len(element)}"
    elif tf.is_tensor(element):
        description = "one tensor"
    raise errors.ArgumentError(
        f"step_fn takes {num_parts} arguments from each element of its inputs, which "
        f"is {description}.",
        errors.sites_of("step_fn", step_fn),
        f"let the inputs yield tuples of {num_parts}, as in "
        "tf.data.Dataset.zip(images, labels); or let step_fn take the element as one "
        "argument, and others by name only: def step_fn(element, *, y=None).",
    )


def _most_parts(step_fn: Any, num_extra: int) -> int:
    """Returns how many parts of an element fit a step_fn that takes one argument.

    Its optional parameters hold further parts if they are None by default. Any other
    default is that of a setting: step_fn(batch, training=True) takes a whole tuple.
    """
    positional = [p for p in checks.parameters(step_fn) if p.kind in _POSITIONAL]
    count = 1
    for parameter in positional[1 : len(positional) - num_extra]:
        if parameter.default is not None:
            break
        count += 1
    return count


def check_session(session: Any) -> None:
    """Raises ArgumentError unless inputs can be restarted in this session."""
    graph = getattr(session, "graph", None) if callable(_run_of(session)) else None
    if session is not None and not isinstance(graph, tf.Graph):
        raise base.bad_argument(
            "initialize",
            f"was given {errors.repr_of(session)}",
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
        "a step was built into a tf.Graph, which a session runs; in between-graph "
        "mode, hosts communicate in eager programs only.",
        errors.sites_of("step_fn", step_fn),
        "run the step eagerly or in a tf.function; or run the program in-graph, which "
        "needs no --mode=between.",
    )
