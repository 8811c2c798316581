"""Which hosts are why something failed: TensorFlow's errors name tasks, or nobody."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from replicator import errors
from replicator.cluster import health, state, watch

_QUICK = 0.5  # seconds for an answer; who is silent for longer, the watch finds
_TASK = re.compile(rf"/job:{state.WORKER}/replica:0/task:(\d+)")
_FIX = (
    "connect again and restore a checkpoint, as replicator.resilient(train) does by "
    "itself; variables on a lost host are gone, those on others may be half written."
)


def lost(error: BaseException) -> errors.HostLostError | None:
    """Returns the error to raise in place of another whose cause is a lost host.

    Takes milliseconds, or half a second if a host is silent.

    Args:
        error: What was raised.

    Returns:
        None if all hosts are there, or the error is about something else.
    """
    if isinstance(error, errors.HostLostError):
        return error
    if not isinstance(error, tf.errors.OpError) or _is_about_inputs(error):
        return None
    watched = watch.watchers()
    if not watched:
        return None
    problems, what = _problems(watched), "lost"
    if not problems and isinstance(error, tf.errors.UnavailableError):
        problems, what = _told_by(error, watched), "there, but connections broke"
    if not problems:
        return None
    names = [name for name, _ in problems]
    verb = "is" if len(names) == 1 else "are"
    return errors.HostLostError(
        errors.compose(
            f"{len(names)} of {len(watched)} hosts {verb} {what}: {', '.join(names)}.",
            [*(f"{name}: {problem}" for name, problem in problems), *_place()],
            _FIX,
        ),
        tuple(names),
    )


@contextlib.contextmanager
def named() -> Iterator[None]:
    """In this block, errors whose cause is a lost host become those that name it.

    Raises:
        HostLostError: A host is lost.
    """
    try:
        yield
    except tf.errors.OpError as error:
        found = lost(error)
        if found is None or found is error:
            raise
        raise found from error


def _is_about_inputs(error: BaseException) -> bool:
    return isinstance(error, tf.errors.OutOfRangeError)


def _place() -> list[str]:
    line = errors.user_line()
    return [] if line == errors.UNKNOWN else [f"at {line}"]


def _problems(watched: Sequence[watch.Watcher]) -> list[tuple[str, str]]:
    """Returns the hosts that are lost now, as the user wrote them, and why."""
    known = {w.host.address: w.problem for w in watched if w.problem is not None}
    found = health.lost([watcher.host for watcher in watched], _QUICK, known)
    return [
        (w.host.name, found[w.host.address]) for w in watched if w.host.address in found
    ]


def _told_by(
    error: tf.errors.OpError, watched: Sequence[watch.Watcher]
) -> list[tuple[str, str]]:
    """Returns the hosts that were lost and are back, or those TensorFlow speaks of."""
    were = [(w.host.name, f"it was {w.last}") for w in watched if w.last is not None]
    if were:
        return were
    tasks = {int(number) for number in _TASK.findall(str(error.message))}
    told = errors.told(error)
    return [(w.host.name, told) for w in watched if w.task in tasks]
