# SPDX-License-Identifier: Apache-2.0
"""Every error class of the library, and the composition of their messages.

Callers pass the facts, and get an exception whose text says what happened, where, what
was expected and what to do.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import autograph
from replicator._tf import frames as tf_frames

UNKNOWN = "an unknown line"  # if no line of the user's is on the stack
_LONGEST = 300  # characters of a value in a message


class ReplicatorError(autograph.LeftAsItIs, Exception):
    """The base class of every error that this library raises by itself.

    Args:
        problem: One sentence that says what is wrong; or the whole text, alone.
        sites: As for `compose`.
        fix: Likewise.
    """

    def __init__(
        self, problem: str = "", sites: Sequence[str] | None = None, fix: str = ""
    ) -> None:
        is_whole = sites is None and not fix
        super().__init__(problem if is_whole else compose(problem, sites, fix))


class MismatchError(ReplicatorError, ValueError):
    """Replicas communicate or return differently."""


class DeadlockError(ReplicatorError, ValueError):
    """Replicas wait for one another in a cycle."""


class ContextError(ReplicatorError, RuntimeError):
    """A call outside a step belongs inside one, or the other way around.

    Attributes:
        outside: The name and line of a call made outside any step; None for other
            errors.
    """

    outside: tuple[str, str] | None = None


class DeviceError(ReplicatorError, ValueError):
    """A device does not exist, is listed twice, or was requested too late."""


class InputError(ReplicatorError, ValueError):
    """An input_fn cannot feed a step, or a batch size leaves a remainder."""


class ArgumentError(ReplicatorError, ValueError):
    """A primitive or an optimizer was called with an argument it cannot honour."""


class StrategyError(ArgumentError):
    """A strategy is invalid in itself, or does not fit the variables or the devices."""


class PerReplicaError(ReplicatorError, TypeError):
    """A PerReplica, one value per replica, was used as if it were one value."""


class UnsupportedError(ReplicatorError, AttributeError):
    """Code asks for an operation or value that has no meaning in a step."""


class CloneError(ReplicatorError, ValueError):
    """A step needs replicas that differ where build="clone" makes copies of one."""


class ClusterError(ReplicatorError, RuntimeError):
    """The hosts of a cluster are described wrongly, missing, silent or gone."""


class HostLostError(ClusterError, tf.errors.UnavailableError):
    """Hosts of a connection were killed, are silent or cut off.

    It is also a tf.errors.UnavailableError, which TensorFlow raises in that case, and
    which its own training loops handle.

    Args:
        message: The text.
        hosts: The lost hosts, as the user wrote them.

    Attributes:
        hosts: The lost hosts, as a tuple.
    """

    def __init__(self, message: str, hosts: Sequence[str] = ()) -> None:
        tf.errors.UnavailableError.__init__(self, None, None, message)
        self.hosts = tuple(hosts)

    def __str__(self) -> str:
        return str(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.hosts)


class DependencyError(ReplicatorError, ImportError):
    """A package that only parts of the library need is not installed."""


class InternalError(ReplicatorError, RuntimeError):
    """The library has made a mistake, and noticed it before it could do harm."""


def called_outside(error: BaseException | None) -> tuple[str, str] | None:
    """Returns the name and line of a call outside any step that caused an error.

    None if there is none. Keras wraps errors in new ones, so causes are searched.
    """
    while error is not None:
        outside = getattr(error, "outside", None)
        if outside is not None:
            return outside
        error = error.__cause__ or error.__context__
    return None


def compose(problem: str, sites: Sequence[str] | None = None, fix: str = "") -> str:
    """Composes a message: the problem, one line per site, the fix.

    Args:
        problem: One sentence that says what is wrong.
        sites: What happens where, e.g. "replica 0: all_reduce at train.py:4 in step".
            None: the user's line that is running, if there is one.
        fix: What to do about it, without the leading "Fix:".

    Returns:
        The text of the exception.
    """
    if sites is None:
        place = user_line()
        sites = [] if place == UNKNOWN else [f"at {place}"]
    lines = [problem, *(f"  {site}" for site in sites)]
    if fix:
        lines.append(f"Fix: {fix}")
    return "\n".join(lines)


def compose_with_prefix(prefix: str, error: Exception) -> str:
    """Returns a message that puts text in front of another error of this library.

    Args:
        prefix: The text in front, e.g. whose error it is.
        error: The other error, which has sites and a fix.
    """
    return f"{prefix}, but {error}"


def repr_of(value: Any) -> str:
    """Returns the repr of any value that a user has passed, truncated if it is long.

    Some values have none: a repr may raise, and Python writes no int of 5,000 digits.
    """
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def type_of(value: Any) -> str:
    """Returns the name of a value's type with its article: "an int", "a list"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOaeio" else f"a {name}"


def summary(error: BaseException) -> str:
    """Returns the type and message of another library's error, in one short line."""
    text = one_line(error, _LONGEST)
    return f"{type(error).__name__}: {text}".rstrip(": .")


def one_line(error: BaseException | str, most: int = 1000) -> str:
    """Returns the text of an error in one line, truncated if it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[:most]}..."


def user_line() -> str:
    """Returns the innermost line of the user's code on the stack, and its function."""
    return innermost(tf_frames.user_frames())


def definition(function: Any) -> str:
    """Returns the user's line that defines a callable, and its name; "" if unknown."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "python_function", function)  # of a tf.function
    function = inspect.unwrap(function)
    method = inspect.getattr_static(type(function), "__call__", None)
    code = getattr(function, "__code__", getattr(method, "__code__", None))
    if code is None:
        return ""
    return _place(code.co_filename, code.co_firstlineno, code.co_name)


def sites_of(role: str, function: Any) -> list[str]:
    """Returns the line that defines a user's callable, and the line that is running.

    Args:
        role: The callable's role, e.g. "step_fn".
        function: The callable.
    """
    where = definition(function)
    return [*([f"{role}: {where}"] if where else []), f"at {user_line()}"]


def line_of(origin: tf.Operation | BaseException) -> str:
    """Returns the user's line that created a graph op or raised, and its function."""
    return innermost(tf_frames.user_frames(origin))


def sites_of_ops(ops: Sequence[tf.Operation], replica_ids: Sequence[int]) -> list[str]:
    """Returns the lines of what all replicas do: one, or one each if they differ.

    Args:
        ops: `ops[n]` is the graph op of `replica_ids[n]`.
        replica_ids: The replicas.
    """
    lines = [line_of(op) for op in ops]
    if len(set(lines)) == 1:
        return [f"at {lines[0]}"]
    return [
        f"replica {r}: at {line}" for r, line in zip(replica_ids, lines, strict=True)
    ]


def innermost(frames: Sequence[tuple[str, int, str]]) -> str:
    """Returns the last of the user's frames, which are (file, line, function)."""
    if not frames:
        return UNKNOWN
    return _place(*frames[-1])


def _place(filename: str, line: int, function: str) -> str:
    near = os.path.relpath(filename)
    place = f"{filename if near.startswith('..') else near}:{line}"
    return f"{place} in {function or '<lambda>'}"  # autograph leaves lambdas nameless
