# SPDX-License-Identifier: Apache-2.0
"""Rehearsal: a program run on other devices than it names, for the profiler.

`python -m replicator.profile` measures what a step costs on one replica, or on four, by
building the program anew on that many replicas, each with the original batch size. A
Replicator created in a rehearsal has that many replicas and, if one is given, another
strategy; of the steps built in it, the rehearsal records the ops that run once for all
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
        num_shares: The number of parts of a global batch: as many as the replicas that
            the program names.
        strategy: Replaces the program's strategy; None: the program's own.
        ops_for_all: Collects the names of ops that one replica runs for all.
    """

    replicas: int | None = None
    num_shares: int | None = None
    strategy: Any = None
    ops_for_all: set[str] = dataclasses.field(default_factory=set, compare=False)


_NO_REHEARSAL = Rehearsal()
_REHEARSAL: contextvars.ContextVar[Rehearsal] = contextvars.ContextVar(
    "rehearsal", default=_NO_REHEARSAL
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
    return _REHEARSAL.get() is not _NO_REHEARSAL


def strategy(requested: Any) -> Any:
    """Returns the strategy of a Replicator.

    Args:
        requested: The strategy that the program passed.
    """
    replacement = _REHEARSAL.get().strategy
    return requested if replacement is None else replacement


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
    specs = [tf.DeviceSpec.from_string(name) for names in devices for name in names]
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
    return rehearsal.num_shares if rehearsal.num_shares is not None else replicas


def record_ops_for_all(names: Callable[[], Iterable[str]]) -> None:
    """Records the ops that run once for all replicas, if this is a rehearsal.

    Args:
        names: Returns the names of those ops.
    """
    if is_on():
        _REHEARSAL.get().ops_for_all.update(names())
