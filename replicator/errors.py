"""Every error class of the library, and how a message is put together.

Callers pass in what they know, and get back an exception whose text says what happened,
where, what was expected and the way out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from replicator import _tf

UNKNOWN = "an unknown line"  # where no line of the user is on the stack

# Autograph re-creates exceptions that cross converted code and turns those with a
# constructor of their own into StagingError; `__init__ = Exception.__init__` tells it
# that a class is safe to re-create from its message alone.


class ReplicatorError(Exception):
    """The base of every error that this library raises by itself."""

    __init__ = Exception.__init__


class MismatchError(ReplicatorError, ValueError):
    """Replicas communicate or return differently."""

    __init__ = Exception.__init__


class DeadlockError(ReplicatorError, ValueError):
    """Replicas wait for one another in a circle."""

    __init__ = Exception.__init__


class ContextError(ReplicatorError, RuntimeError):
    """Something was done outside (or inside) a step that belongs inside (outside)."""

    __init__ = Exception.__init__


class DeviceError(ReplicatorError, ValueError):
    """A device does not exist, stands twice, or was asked for too late."""

    __init__ = Exception.__init__


class InputError(ReplicatorError, ValueError):
    """An input_fn cannot feed a step, or a batch size leaves a remainder."""

    __init__ = Exception.__init__


class ArgumentError(ReplicatorError, ValueError):
    """A primitive or an optimizer was called with an argument it cannot honour."""

    __init__ = Exception.__init__


class UnsupportedError(ReplicatorError, AttributeError):
    """Code for tf.distribute asks for what has no meaning in a step."""

    __init__ = Exception.__init__


class CloneError(ReplicatorError, ValueError):
    """Replicas cannot be copies of one another, as build="clone" would have them."""

    __init__ = Exception.__init__


class DependencyError(ReplicatorError, ImportError):
    """A package that only some of the library needs is not installed."""

    __init__ = Exception.__init__


def compose(problem: str, sites: Sequence[str] = (), fix: str = "") -> str:
    """Puts a message together: the problem, one line per site, the way out.

    Args:
        problem: One sentence that says what is wrong.
        sites: What stands where, e.g. "replica 0: all_reduce at train.py:4 in step".
        fix: What to do about it, without the leading "Fix:".

    Returns:
        The text of the exception.
    """
    lines = [problem, *(f"  {site}" for site in sites)]
    if fix:
        lines.append(f"Fix: {fix}")
    return "\n".join(lines)


def user_line() -> str:
    """Returns the innermost line of the user's code on the stack, and its function."""
    return _innermost(_tf.user_frames())


def line_of(what: tf.Operation | BaseException) -> str:
    """Returns the user's line that made a graph op or raised, and its function."""
    return _innermost(_tf.user_frames(what))


def _innermost(frames: Sequence[tuple[str, int, str]]) -> str:
    if not frames:
        return UNKNOWN
    filename, line, function = frames[-1]
    near = os.path.relpath(filename)
    place = f"{filename if near.startswith('..') else near}:{line}"
    return f"{place} in {function or '<lambda>'}"  # autograph leaves lambdas nameless
