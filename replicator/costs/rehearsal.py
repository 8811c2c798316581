# SPDX-License-Identifier: Apache-2.0
"""Rehearsal: a program run on other devices than it names, for the profiler.

`python -m replicator.profile` measures what a step costs on one replica, or on four, by
building the program anew on that many replicas, each with the original batch size. A
Replicator created in a rehearsal has that many replicas and, if one is given, another
strategy; of the steps built in it, the rehearsal notes the ops that run once for all
replicas.
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
    """The differences between how a program runs and what it says.

    Attributes:
        replicas: The number of replicas; None: as many as the program names.
        named: The number of replicas that the program names, from which shares of a
            global batch are computed.
        strategy: Replaces the program's strategy; None: the program's own.
        once: Collects the names of ops that one replica runs for all.
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
    """In this block, programs are built and run as the rehearsal says."""
    token = _REHEARSAL.set(rehearsal)
    try:
        yield
    finally:
        _REHEARSAL.reset(token)


def is_on() -> bool:
    """Whether a program is rehearsed: one replica then owns what one of many would."""
    return _REHEARSAL.get() is not _NONE


def strategy(own: Any) -> Any:
    """Returns the strategy of a Replicator.

    Args:
        own: The strategy that the program passed.
    """
    other = _REHEARSAL.get().strategy
    return own if other is None else other


def spread(devices: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Returns the devices of a Replicator: the program's first ones, or more of them.

    Args:
        devices: The devices of each replica, by their full names.
    """
    count = _REHEARSAL.get().replicas
    if count is None or count == len(devices):
        return tuple(devices)
    if count < len(devices):
        return tuple(devices[:count])
    specs = [tf.DeviceSpec.from_string(name) for own in devices for name in own]
    first_free = max(spec.device_index for spec in specs) + 1
    return (
        *devices,
        *(
            (specs[0].replace(device_index=first_free + n).to_string(),)
            for n in range(count - len(devices))
        ),
    )


def shares(replicas: int) -> int:
    """Returns the number of parts into which a global batch is split.

    Args:
        replicas: The number of replicas.
    """
    rehearsal = _REHEARSAL.get()
    return rehearsal.named if rehearsal.named is not None else replicas


def note_once(names: Callable[[], Iterable[str]]) -> None:
    """Notes the ops that run once for all replicas, if this is a rehearsal.

    Args:
        names: Returns the names of those ops.
    """
    if is_on():
        _REHEARSAL.get().once.update(names())
