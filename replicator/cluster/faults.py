# SPDX-License-Identifier: Apache-2.0
"""Finds the lost hosts behind an error: TensorFlow's errors name tasks, or nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from replicator import errors
from replicator._tf import cluster
from replicator.cluster import health, lookout, state, waiting, watch

_QUICK = 0.5  # seconds for an answer; the watch finds hosts that are silent for longer
_TASK = re.compile(rf"/job:{state.WORKER}/(?:replica:0/)?task:(\d+)")
_OF_OTHERS = (  # errors that calls to other processes raise
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.UnknownError,
    tf.errors.InternalError,
)
_FIX = (
    "connect again and restore a checkpoint, as replicator.resilient(train) does by "
    "itself; variables on a lost host are gone, those on others may be half written."
)
_FIX_BETWEEN = (
    "end all processes, and restart them from the last checkpoint, as `python -m "
    "replicator.launch --max-restarts=3` does: TensorFlow cannot continue with the "
    "remaining ones."
)


def lost(error: BaseException) -> errors.HostLostError | None:
    """Returns the error that names the lost hosts which caused `error`.

    Takes milliseconds, or half a second if a host is silent.

    Args:
        error: The original error.

    Returns:
        None if no host is lost, or the error has another cause.
    """
    if isinstance(error, errors.HostLostError):
        return error
    if not isinstance(error, tf.errors.OpError) or _is_about_inputs(error):
        return None
    watched = watch.watchers()
    if not watched:
        return None
    if cluster.joined() is not None:
        problems = _between(error, watched)
        return _lost_error(problems, len(watched) + 1, "lost", _FIX_BETWEEN)
    problems, condition = of_hosts(), "lost"
    if not problems and isinstance(error, tf.errors.UnavailableError):
        problems, condition = (
            _reported_by(error, watched),
            "there, but connections broke",
        )
    return _lost_error(problems, len(watched), condition, _FIX)


def _lost_error(
    problems: Sequence[tuple[str, str]], count: int, condition: str, fix: str
) -> errors.HostLostError | None:
    """Returns the error that names the hosts with problems; None if there are none."""
    if not problems:
        return None
    names = [name for name, _ in problems]
    verb = "is" if len(names) == 1 else "are"
    return errors.HostLostError(
        errors.compose(
            f"{len(names)} of {count} hosts {verb} {condition}: {', '.join(names)}.",
            [*(f"{name}: {problem}" for name, problem in problems), *_place()],
            fix,
        ),
        tuple(names),
    )


def of_hosts() -> list[tuple[str, str]]:
    """Returns the hosts of the connection that are lost now, and why.

    Takes milliseconds, or half a second if a host is silent.
    """
    return _problems(watch.watchers())


def require_all() -> None:
    """Checks that no host of the connection is lost.

    Raises:
        HostLostError: One is.
    """
    error = _lost_error(of_hosts(), len(watch.watchers()), "lost", _FIX)
    if error is not None:
        raise error


def check() -> None:
    """Checks, in between-graph mode, that no other process is known to be gone.

    Raises:
        HostLostError: A process is.
    """
    watched = watch.watchers()
    lost_hosts = [(w.host.name, w.problem) for w in watched if w.problem is not None]
    error = _lost_error(lost_hosts, len(watched) + 1, "lost", _FIX_BETWEEN)
    if error is not None:
        raise error


def ask(seconds: float) -> None:
    """Probes all other processes, in between-graph mode.

    Args:
        seconds: How long a process may take to answer.

    Raises:
        HostLostError: A process does not answer, or has reported its end.
    """
    check()
    watched = watch.watchers()
    error = _lost_error(
        _ask_all(watched, seconds), len(watched) + 1, "lost", _FIX_BETWEEN
    )
    if error is not None:
        raise error


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Turns errors that lost hosts cause in this block into errors that name them.

    Raises:
        HostLostError: A host is lost.
    """
    try:
        yield
    except tf.errors.OpError as error:
        host_error = lost(error)
        if host_error is None or host_error is error:
            raise
        raise host_error from error


def _is_about_inputs(error: BaseException) -> bool:
    return isinstance(error, tf.errors.OutOfRangeError)


def _place() -> list[str]:
    line = errors.user_line()
    return [] if line == errors.UNKNOWN else [f"at {line}"]


def _problems(watched: Sequence[watch.Watcher]) -> list[tuple[str, str]]:
    """Returns the hosts that are lost now, by the user's names, and why."""
    watch_problems = {
        w.host.address: w.problem for w in watched if w.problem is not None
    }
    problems = health.lost(
        [watcher.host for watcher in watched], _QUICK, watch_problems
    )
    return [
        (w.host.name, problems[w.host.address])
        for w in watched
        if w.host.address in problems
    ]


def _between(
    error: tf.errors.OpError, watched: Sequence[watch.Watcher]
) -> list[tuple[str, str]]:
    """Returns the other processes that ended or failed, and why."""
    reports = lookout.read(str(error.message))
    problems = [(w.host.name, reports[w.task]) for w in watched if w.task in reports]
    if reports and not problems:
        problems = [("this host", text) for text in reports.values()]
    if problems:
        return problems
    problems = [(w.host.name, w.problem) for w in watched if w.problem is not None]
    if problems:
        return problems
    if not _is_about_others(error):
        return []
    return _ask_all(watched, _QUICK) or _reported_by(error, watched)


def _ask_all(watched: Sequence[watch.Watcher], seconds: float) -> list[tuple[str, str]]:
    unanswered = waiting.ask_all([w.host.address for w in watched], seconds)
    problems = []
    for w in watched:
        if w.host.address in unanswered:
            note = lookout.ended(w.task)
            problems.append((w.host.name, note or unanswered[w.host.address]))
    return problems


def _is_about_others(error: tf.errors.OpError) -> bool:
    """Whether an error may be due to another process and not to the step itself."""
    return isinstance(error, _OF_OTHERS)


def _reported_by(
    error: tf.errors.OpError, watched: Sequence[watch.Watcher]
) -> list[tuple[str, str]]:
    """Returns the hosts that were lost and are back, or those the error names."""
    recovered = [
        (w.host.name, f"it was {w.last}") for w in watched if w.last is not None
    ]
    if recovered:
        return recovered
    tasks = {int(number) for number in _TASK.findall(str(error.message))}
    text = errors.summary(error)
    return [(w.host.name, text) for w in watched if w.task in tasks]
