# SPDX-License-Identifier: Apache-2.0
"""Runs a case and judges the outcome.

An outcome is right if the value is accepted and computes the expected result; or it is
refused by an error of ours that names the user's line, says what was expected and has a
limited length; or the user's own code raised, or plain TensorFlow raises the same. All
else is bad: errors from inside the library, other libraries' texts, hangs, unlimited
time or memory, and changes to the process.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import signal
import time
import traceback
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator import context
from replicator.costs import rates
from tests.bad_inputs import cases, programs
from tests.bad_inputs.values import Hostile

WALL = 60  # seconds after which a case counts as hanging
CPU = 15  # seconds of work, on any number of cores, that a bad value may cost
LONGEST = 4000  # characters of a message
_OURS = os.path.dirname(replicator.__file__) + os.sep
# Output of TensorFlow and absl themselves.
_BANNER = re.compile(
    r"[IWEF]\d{4} |WARNING|\d{4}-\d\d-\d\d |To enable the following|training:|\s*$"
)
# Callables that raise errors of their own, or, without Python frames, out of ours.
_CALLED = ("builtin len", "builtin max", "bound method", "Keras layer")
_CALLED += tuple(map(repr, (int, type, object)))
# Results that differ each time, or are no numbers.
_RANDOM = ("random tensor", "variable handle", "variant")


class Endless(BaseException):
    """The case has run for WALL seconds."""


def run(case: cases.Case) -> str:
    """Returns "accepted", "refused", "user's own", "as plain" or "BAD: why"."""
    started = time.process_time()
    graph = tf.Graph() if case.mode == "graph" else None
    try:
        with _limit(WALL), graph.as_default() if graph else contextlib.nullcontext():
            verdict = _run(case)
    except Endless:
        verdict = f"BAD: takes over {WALL} s"
    except MemoryError:
        verdict = "BAD: takes memory without end"
    except Exception as error:
        verdict = f"BAD: the judge says {error!r}"[:300]
    os.environ.pop(rates.VARIABLE, None)
    spent = time.process_time() - started
    if spent > CPU and not case.program.pool == "texts":
        verdict = f"BAD: takes {spent:.0f} s of work; {verdict}"
    return harm() or verdict


def harm() -> str:
    """Returns a description of the disorder that a case has left, or ""."""
    if context.current() is not None:
        return "BAD: a replica is still being built"
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            return f"BAD: file descriptor {number} is closed"
    if not tf.executing_eagerly():
        return "BAD: a graph is still being built"
    return ""


def _run(case: cases.Case) -> str:
    try:
        names = cases.namespace(case)
    except Exception as error:
        return f"no value: {type(error).__name__}"  # not in this mode
    source = case.program.source(case.mode)
    lines = source.splitlines(keepends=True)
    linecache.cache[programs.FILE] = (len(source), None, lines, programs.FILE)
    tf.debugging.disable_traceback_filtering()  # the judge asks whose the frames are
    try:
        exec(compile(source, programs.FILE, "exec"), names)
    except (Endless, MemoryError):
        raise
    except BaseException as error:
        return _judged(case, error)
    finally:
        tf.debugging.enable_traceback_filtering()
    if case.mode == "outside":
        # Outside of a step, variables and optimizers behave as in plain TensorFlow.
        alone = ("repl.run", "repl.build", "repl.group")
        mine = case.program.line.startswith(alone) or "repl." not in case.program.line
        return "accepted" if mine else "BAD: accepted outside of a step"
    return _compared(case, names)


def _judged(case: cases.Case, error: BaseException) -> str:
    """Judges an error."""
    if isinstance(error, cases.Ended):
        return _of_program(*error.args)
    if isinstance(error, Hostile):
        return "user's own"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, replicator.ReplicatorError):
        return _of_ours(error, text)
    frames = traceback.extract_tb(error.__traceback__)
    users = [n for n, frame in enumerate(frames) if frame.filename == programs.FILE]
    after = frames[max(users, default=-1) + 1 :]
    ours = [frame for frame in after if frame.filename.startswith(_OURS)]
    if not ours or case.value in _CALLED:
        return "user's own"
    if isinstance(error, tf.errors.OutOfRangeError):
        return "accepted"
    ran = any(f.filename.endswith("steps.py") and f.name == "call" for f in ours)
    if isinstance(error, tf.errors.OpError) and ran:
        return "accepted"  # and fails when it runs
    if case.program.plain and _as_plain(case, error):
        return "as plain"
    last = frames[-1]
    where = f"{last.filename.rpartition('site-packages/')[2]}:{last.lineno}"
    return f"BAD: {text[:300]!r} at {where}, from {_short(ours[-1])}"


def _short(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename.removeprefix(_OURS)}:{frame.lineno}"


def _of_ours(error: BaseException, text: str) -> str:
    """Judges a message of ours."""
    if len(text) > LONGEST:
        return f"BAD: a message of {len(text)} characters: {text[:100]!r}"
    if "Fix: " not in text:
        return f"BAD: no way out: {text[:300]!r}"
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame.lineno for frame in frames if frame.filename == programs.FILE]
    named = [int(n) for n in re.findall(rf"{programs.FILE}:(\d+)", text)]
    if not named:
        return f"BAD: no line: {text[:300]!r}"
    # An error that is raised after all replicas are built names lines that have
    # returned.
    if users and users[-1] not in named and max(users) not in named:
        step = [line for line in named if line <= max(users)]
        if not step:
            return f"BAD: another line than {users}: {text[:300]!r}"
    try:
        text.encode()
    except UnicodeError:
        return f"BAD: a message that cannot be printed: {text[:300]!r}"
    return "refused"


def _of_program(status: Any, said: str) -> str:
    """Judges the end of a program."""
    lines = [line for line in said.splitlines() if not _BANNER.match(line)]
    if "Traceback" in said:
        return f"BAD: a traceback: {lines[-1][:300]!r}"
    if status in (0, None) or status == 3:
        return "accepted"
    if status == 1 and not lines:
        return "accepted"  # --help, which prints everything to standard output
    if status not in (1, 2):
        return f"BAD: status {status!r}: {lines}"
    if len(lines) != 1 or len(lines[0]) > LONGEST:
        return f"BAD: {len(lines)} lines: {said[-300:]!r}"
    return "refused"


def _as_plain(case: cases.Case, error: BaseException) -> bool:
    """Whether plain TensorFlow raises the same error at the same line."""
    names = {**cases.namespace(case), **cases.plain_names()}
    line = case.program.plain
    code = compile(line, programs.FILE, "exec")
    messages = set()
    traced = tf.function(lambda: exec(code, names), autograph=False)
    for run in (lambda: exec(code, names), traced):
        try:
            run()
        except Exception as other:
            messages.add(type(other).__name__)
    return type(error).__name__ in messages


def _compared(case: cases.Case, names: dict[str, Any]) -> str:
    """Compares an accepted value's result with the expected one."""
    if not case.program.want or case.value in _RANDOM or case.mode == "branch":
        return "accepted"
    again = {**names, "bad": _native(case.make()), "x": tf.constant([1.0, 2.0])}
    try:
        # In a graph, as in a step: there TensorFlow takes larger integers.
        compute = lambda: eval(case.program.want, again)  # noqa: E731
        graph = case.mode == "graph"
        want = compute() if graph else tf.function(compute, autograph=False)()
    except Exception as error:
        if "IndexedSlices" in str(error):
            return "accepted"  # which have no dense form without a shape
        return f"BAD: accepted, though plain TensorFlow says {error!r}"[:300]
    if case.mode == "graph":
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            want = session.run(want)
    got = names["result"]
    flat, expected = _leaves(got), _leaves(want)
    if len(flat) != 2 * len(expected):
        return f"BAD: {len(flat)} values on 2 replicas, for {len(expected)}"
    for n, one in enumerate(flat):
        two = expected[n // 2]
        try:
            np.testing.assert_array_equal(_array(one), _array(two))
        except AssertionError:
            return f"BAD: replica {n % 2} has {one!r} for {two!r}"[:300]
    return "accepted"


def _native(value: Any) -> Any:
    """Returns a big-endian array in the order of this machine.

    In a graph, plain TensorFlow reads the bytes of a big-endian one in the wrong order.
    """
    if not isinstance(value, np.ndarray) or value.dtype.isnative:
        return value
    return value.astype(value.dtype.newbyteorder("="))


def _leaves(value: Any) -> list[Any]:
    """Returns the leaves of a nest; a session's IndexedSlices are tuples there."""
    if hasattr(value, "dense_shape"):
        return [value]
    if isinstance(value, list | tuple):
        return [leaf for entry in value for leaf in _leaves(entry)]
    return tf.nest.flatten(value)


def _array(value: Any) -> Any:
    """Returns a tensor as an array, a composite one in dense form."""
    if hasattr(value, "indices") and hasattr(value, "values"):
        rows = np.asarray(value.values)
        dense = np.zeros((3, *rows.shape[1:]), rows.dtype)
        np.add.at(dense, np.asarray(value.indices), rows)
        return dense
    return np.asarray(value)


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    """Raises Endless after so many seconds in this block."""

    def ring(signum: int, frame: types.FrameType | None) -> None:
        raise Endless

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
