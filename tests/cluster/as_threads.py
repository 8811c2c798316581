# SPDX-License-Identifier: Apache-2.0
"""Two processes of a between-graph program as threads, and a fake of their store."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import replicator
from replicator._tf import cluster
from replicator.cluster import clashes, peers


def fake_store(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Puts a dictionary in place of TensorFlow's store, which all threads share."""
    kept: dict[str, str] = {}

    def get(key: str, seconds: float) -> str | None:
        until = time.monotonic() + seconds
        while key not in kept and time.monotonic() < until:
            time.sleep(0.002)
        return kept.get(key)

    def put(key: str, value: str) -> None:
        assert key not in kept, "TensorFlow takes a key once"
        kept[key] = value

    monkeypatch.setattr(cluster, "store_get", get)
    monkeypatch.setattr(cluster, "store_put", put)
    return kept


def two_peers() -> list[peers.Peers]:
    """Returns the processes, as each of them sees all."""
    with pytest.MonkeyPatch.context() as patch:
        # Each process has a count of its own.
        patch.setattr(peers, "_numbers", itertools.repeat(0))
        return [
            peers.Peers(
                peers.ProcessGroup(k, ("a:1", "b:2")), clashes.ActivityMonitor(k, [])
            )
            for k in (0, 1)
        ]


def together(
    one: Callable[[peers.Peers], Any], other: Callable[[peers.Peers], Any]
) -> list[Any]:
    """Runs a function in each process; returns each result or error of Replicator's."""
    results: list[Any] = [None, None]
    does = one, other
    processes = two_peers()

    def run(k: int) -> None:
        try:
            results[k] = does[k](processes[k])
        except replicator.ReplicatorError as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
