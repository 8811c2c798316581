# SPDX-License-Identifier: Apache-2.0
"""A program on other devices than it names: for `python -m replicator.profile`.

What a step costs on one replica, or on four, is measured by making the program anew on
so many, where each replica's batch is as large as it was. A Replicator that is made in
a rehearsal has so many replicas and, where one is given, another strategy; of the steps
that are built in it, it notes what is done once for all replicas.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What is otherwise than the program says.

    Attributes:
        replicas: How many there are; None: as many as the program names.
        named: How many it names: what shares of a global batch are told.
        strategy: In place of the program's; None: its own.
        once: Is given the names of ops that one replica runs for all.
    """

    replicas: int | None = None
    named: int | None = None
    strategy: Any = None
    once: set[str] = dataclasses.field(default_factory=set, compare=False)


_NONE = Rehearsal()
_REHEARSAL: contextvars.ContextVar[Rehearsal] = contextvars.ContextVar(
    "rehearsal", default=_NONE
)


@contextlib.contextmanager
def on(rehearsal: Rehearsal) -> Iterator[None]:
    """In this block, programs are made, built and run otherwise than they say."""
    token = _REHEARSAL.set(rehearsal)
    try:
        yield
    finally:
        _REHEARSAL.reset(token)


def is_on() -> bool:
    """Whether a program is rehearsed: one replica owns what one of several would."""
    return _REHEARSAL.get() is not _NONE


def strategy(own: Any) -> Any:
    """Returns the strategy of a Replicator.

    Args:
        own: That which the program gave it.
    """
    other = _REHEARSAL.get().strategy
    return own if other is None else other


def spread(devices: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Returns the devices of a Replicator: the first of the program's, or more of them.

    Args:
        devices: Those of each replica, by their full names.
    """
    count = _REHEARSAL.get().replicas
    if count is None or count == len(devices):
        return tuple(devices)
    if count < len(devices):
        return tuple(devices[:count])
    taken = [tf.DeviceSpec.from_string(name) for own in devices for name in own]
    more = max(spec.device_index for spec in taken) + 1
    return (
        *devices,
        *(
            (taken[0].replace(device_index=more + n).to_string(),)
            for n in range(count - len(devices))
        ),
    )


def shares(replicas: int) -> int:
    """Returns into how many parts a global batch is cut.

    Args:
        replicas: How many there are.
    """
    rehearsal = _REHEARSAL.get()
    return rehearsal.named if rehearsal.named is not None else replicas


def note_once(names: Callable[[], Iterable[str]]) -> None:
    """Notes what of a step is done once for all replicas, if this is a rehearsal.

    Args:
        names: Returns the names of those ops.
    """
    if is_on():
        _REHEARSAL.get().once.update(names())
