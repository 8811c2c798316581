# SPDX-License-Identifier: Apache-2.0
"""A training is called again after hosts were lost, and after nothing else."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import replicator
from replicator._tf import cluster
from replicator.hosts import connection, resilient


class _Cluster:
    """A fake connection to hosts."""

    def __init__(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


class _Connections:
    """Fake connections.

    Attributes:
        made: All of them.
        failures: How many of the next attempts find a host that does not answer.
        asked: The options of each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[_Cluster] = []
        self.failures = 0
        self.asked: list[dict[str, Any]] = []
        monkeypatch.setattr(connection, "connect", self._connect)

    def _connect(self, hosts: Any, **options: Any) -> _Cluster:
        assert not any(cluster.is_open for cluster in self.made)
        self.asked.append({"hosts": hosts, **options})
        if self.made and self.failures:
            self.failures -= 1
            raise replicator.ClusterError("host-b does not answer")
        self.made.append(_Cluster())
        return self.made[-1]


class _Train:
    """A training that loses a host in its first lives."""

    def __init__(self, faults: int, fault: type[Exception] | None = None) -> None:
        self.faults, self.fault = faults, fault or replicator.HostLostError
        self.clusters: list[Any] = []

    def __call__(self, cluster: Any) -> int:
        assert cluster.is_open
        self.clusters.append(cluster)
        if len(self.clusters) <= self.faults:
            raise self.fault(f"fault {len(self.clusters)}")
        return len(self.clusters)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> _Connections:
    return _Connections(monkeypatch)


@pytest.mark.parametrize("faults", [0, 1, 3])
def test_each_life_has_a_connection_of_its_own(
    faults: int, connections: _Connections
) -> None:
    train = _Train(faults)
    assert replicator.resilient(train, ["a:1"], max_restarts=3) == faults + 1
    assert train.clusters == connections.made
    assert not any(cluster.is_open for cluster in connections.made)


def test_hosts_are_lost_so_often_and_not_more(connections: _Connections) -> None:
    train = _Train(3)
    with pytest.raises(replicator.HostLostError, match="fault 3"):
        replicator.resilient(train, ["a:1"], max_restarts=2)
    assert len(train.clusters) == 3


def test_another_error_is_the_users(connections: _Connections) -> None:
    train = _Train(1, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        replicator.resilient(train, ["a:1"])
    assert len(train.clusters) == 1


def test_hosts_have_time_to_come_back(connections: _Connections) -> None:
    connections.failures = 2
    options = {"heartbeat": 3.0, "client": "me:1"}
    assert replicator.resilient(_Train(1), ["a:1"], timeout=9.0, **options) == 2
    assert len(connections.asked) == 4
    first, *again = connections.asked
    assert first == {"hosts": ["a:1"], "timeout": 9.0, **options}
    for asked in again:  # short attempts, between which the launcher may give one up
        assert asked.pop("timeout") <= resilient._AT_ONCE
        assert asked == {"hosts": ["a:1"], **options}


def test_but_not_for_ever(connections: _Connections) -> None:
    connections.failures = 100
    with pytest.raises(replicator.ClusterError, match="host-b does not answer"):
        replicator.resilient(_Train(1), ["a:1"], timeout=0.1)
    assert connections.failures == 99


def test_processes_that_were_joined_start_anew_themselves(
    connections: _Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "joined", lambda: object())
    with pytest.raises(replicator.HostLostError, match="fault 1"):
        replicator.resilient(_Train(1), ["a:1"])


def test_what_a_lost_life_has_made_is_let_go_of(connections: _Connections) -> None:
    """Variables on a lost host, before the next life makes its own."""
    left: list[weakref.ref[Any]] = []

    def train(cluster: Any) -> None:
        gc.collect()
        assert all(reference() is None for reference in left)
        variables = _Cluster()
        left.append(weakref.ref(variables))
        if len(left) < 3:
            raise replicator.HostLostError("fault")

    replicator.resilient(train, ["a:1"])
    assert len(left) == 3
