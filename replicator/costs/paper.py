# SPDX-License-Identifier: Apache-2.0
"""Hosts on paper: devices that need not exist, for graphs that are built but never run.

`python -m replicator.plan --simulate-hosts` builds a step for more hosts than exist,
and tests build for several hosts on one.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import tensorflow as tf

_HOSTS: contextvars.ContextVar[int | None] = contextvars.ContextVar("hosts on paper")


@contextlib.contextmanager
def on_paper(count: int) -> Iterator[None]:
    """In this block, Replicators build graphs for hosts that need not exist.

    Args:
        count: The number of hosts that replace this one, each with the named devices.
    """
    token = _HOSTS.set(count)
    try:
        yield
    finally:
        _HOSTS.reset(token)


def is_on() -> bool:
    """Whether devices need not exist."""
    return _HOSTS.get(None) is not None


def spread(devices: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Returns the devices of all hosts.

    Args:
        devices: The devices of each replica, by their full names. Devices of this
            process are repeated on each host; others are returned as they are.
    """
    count = _HOSTS.get()
    assert count is not None, "no hosts on paper"
    specs = [[tf.DeviceSpec.from_string(name) for name in names] for names in devices]
    local = [group for group in specs if all(spec.job == "localhost" for spec in group)]
    if len(local) < len(specs):
        return tuple(devices)
    return tuple(
        tuple(spec.replace(job="worker", task=host).to_string() for spec in group)
        for host in range(count)
        for group in specs
    )
