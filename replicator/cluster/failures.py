# SPDX-License-Identifier: Apache-2.0
"""A step that failed while it ran, in one of several processes or in all of them."""

from __future__ import annotations

import time

import tensorflow as tf

from replicator import _tf
from replicator.cluster import faults, lookout
from replicator.cluster.peers import Peers

_GRACE = 1.0  # seconds in which the step fails in all processes, if it does
_POLL = 0.25


def agree(peers: Peers, error: tf.errors.OpError) -> None:
    """Ends the work of all processes, unless a step failed in each of them.

    If it failed in one, others may wait in it for that one, or have done what it has
    not; whatever they do next would meet something else there.

    Args:
        peers: The processes.
        error: What the step raised here.

    Raises:
        HostLostError: A process was lost meanwhile.
    """
    place = f"replicator/failed/{peers.number}/{next(peers.failures)}"
    text = _reason(error)
    with faults.named():
        _tf.store_put(f"{place}/{peers.own}", text)
        if _have_all_told(peers, place):
            return
    lookout.fail(peers.own, f"a step failed there: {text}")


def _have_all_told(peers: Peers, place: str) -> bool:
    until = time.monotonic() + _GRACE
    for process in peers.everyone:
        while _tf.store_get(f"{place}/{process}", _POLL) is None:
            if time.monotonic() > until:
                return False
    return True


def _reason(error: tf.errors.OpError) -> str:
    """Returns what TensorFlow says behind the lines where it all happened."""
    lines = str(error.message).splitlines()
    frames = [k for k, line in enumerate(lines) if line.startswith('  File "')]
    text = " ".join(" ".join(lines[frames[-1] + 1 if frames else 0 :]).split())
    return f"{type(error).__name__}: {text.partition(' [[{{')[0]}"
