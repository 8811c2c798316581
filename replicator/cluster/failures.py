# SPDX-License-Identifier: Apache-2.0
"""Handles a step that fails at run time in some or all of several processes."""

from __future__ import annotations

import time

import tensorflow as tf

from replicator._tf import cluster
from replicator.cluster import faults, lookout
from replicator.cluster.peers import Peers

_GRACE = 1.0  # seconds within which the step must fail in all processes
_POLL = 0.25


def agree(peers: Peers, error: tf.errors.OpError) -> None:
    """Aborts all processes unless the step failed in each of them.

    If it failed in only some, the others may wait for them in it, or have completed it;
    the collectives that follow would no longer match.

    Args:
        peers: The processes.
        error: The error that the step raised in this process.

    Raises:
        HostLostError: A process was lost meanwhile.
    """
    key = f"replicator/failed/{peers.number}/{next(peers.failures)}"
    text = _reason(error)
    with faults.named():
        cluster.store_put(f"{key}/{peers.process}", text)
        if _have_all_reported(peers, key):
            return
    lookout.fail(peers.process, f"a step failed there: {text}")


def _have_all_reported(peers: Peers, place: str) -> bool:
    deadline = time.monotonic() + _GRACE
    for process in peers.processes:
        while cluster.store_get(f"{place}/{process}", _POLL) is None:
            if time.monotonic() > deadline:
                return False
    return True


def _reason(error: tf.errors.OpError) -> str:
    """Returns TensorFlow's message without the stack frames before it."""
    lines = str(error.message).splitlines()
    frames = [k for k, line in enumerate(lines) if line.startswith('  File "')]
    text = " ".join(" ".join(lines[frames[-1] + 1 if frames else 0 :]).split())
    return f"{type(error).__name__}: {text.partition(' [[{{')[0]}"
