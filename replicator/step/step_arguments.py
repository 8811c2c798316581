"""What `run`, `build` and `initialize` are given, checked on every call."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import arguments, errors
from replicator.primitives import base

INPUT_MODES = ("per_replica", "per_worker")


def check(step_fn: Any, input_fn: Any, input_mode: Any, steps_per_call: Any) -> None:
    """Raises ArgumentError or InputError unless there may be such a step; is quick.

    Args:
        step_fn: As for `Replicator.run`.
        input_fn: As for `Replicator.run`.
        input_mode: As for `Replicator.run`.
        steps_per_call: As for `Replicator.run`.
    """
    if not callable(step_fn):
        raise base.bad_argument(
            "run",
            f"was given {errors.shown(step_fn)} as step_fn",
            "pass a function, which is called once per replica.",
        )
    if input_fn is not None and not callable(input_fn):
        raise errors.InputError(
            errors.compose(
                f"input_fn is {type(input_fn).__name__} {errors.shown(input_fn)}.",
                fix="pass a function that returns it, lambda: ...",
            )
        )
    if not arguments.is_choice(input_mode, INPUT_MODES):
        raise errors.InputError(
            errors.compose(
                f"input_mode={errors.shown(input_mode)} is unknown.",
                fix=f"input_mode is one of {', '.join(INPUT_MODES)}.",
            )
        )
    if not arguments.is_whole(steps_per_call, 1):
        raise base.bad_argument(
            "build",
            f"was given steps_per_call={errors.shown(steps_per_call)}",
            "steps_per_call is a positive int below 2**31, how many steps one call "
            "runs.",
        )


def check_takes(step_fn: Any, input_fn: Any) -> None:
    """Raises ArgumentError unless a step_fn can be called with what it is fed."""
    elements = 0 if input_fn is None else 1
    if arguments.refuses(step_fn, elements):
        raise errors.ArgumentError(
            errors.compose(
                f"step_fn cannot be called with {elements} arguments.",
                errors.sites_of("step_fn", step_fn),
                "let step_fn take one argument if there is an input_fn, else none.",
            )
        )


def check_session(session: Any) -> None:
    """Raises ArgumentError unless inputs can be started over in a session."""
    graph = getattr(session, "graph", None) if callable(_run_of(session)) else None
    if session is not None and not isinstance(graph, tf.Graph):
        raise base.bad_argument(
            "initialize",
            f"was given {errors.shown(session)}",
            "pass the tf.compat.v1.Session that runs the step; nothing if the step "
            "runs eagerly.",
        )


def _run_of(session: Any) -> Any:
    return None if tf.is_tensor(session) else getattr(session, "run", None)
