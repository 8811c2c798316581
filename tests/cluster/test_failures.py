# SPDX-License-Identifier: Apache-2.0
"""Steps that fail in one process, or in all; with a fake of TensorFlow's store."""

from __future__ import annotations

import threading

import pytest
import tensorflow as tf

from replicator._tf import cluster
from replicator.cluster import failures, lookout
from tests.cluster.as_threads import two_peers

_ERROR = tf.errors.InvalidArgumentError(
    None, None, 'Graph\n  File "train.py", line 3, in f\n\nx > 2\n\t [[{{node a}}]] [O]'
)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The processes that ended all others, and their reasons."""
    store: dict[str, str] = {}
    result: list[tuple[int, str]] = []
    monkeypatch.setattr(cluster, "store_put", store.__setitem__)
    monkeypatch.setattr(cluster, "store_get", lambda key, _: store.get(key))
    monkeypatch.setattr(lookout, "fail", lambda own, text: result.append((own, text)))
    monkeypatch.setattr(failures, "_GRACE", 0.2)
    return result


def test_one_ends_the_others(ended: list[tuple[int, str]]) -> None:
    failures.agree(two_peers()[1], _ERROR)
    assert ended == [(1, "a step failed there: InvalidArgumentError: x > 2")]


def test_all_go_on(ended: list[tuple[int, str]]) -> None:
    threads = [
        threading.Thread(target=failures.agree, args=(peer, _ERROR))
        for peer in two_peers()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == []
