# SPDX-License-Identifier: Apache-2.0
"""The health of hosts: which ones are asked, and the report on each."""

from __future__ import annotations

import select
import sys
import types
from collections.abc import Sequence

import pytest

import replicator
from replicator._tf import cluster
from replicator.cluster import description, health, state, waiting
from tests.cluster import servers as servers_

_HOSTS = [
    description.Host("host-a", "10.0.0.1:1"),
    description.Host("10.0.0.2:1", "10.0.0.2:1"),
    description.Host("host-c", "10.0.0.3:1"),
]


class _Servers:
    """Servers' answers, without asking them.

    Attributes:
        wrong: The problems of those that do not answer, by address.
        strangers: The tasks of those that answer, and do not know this process.
        asked: The addresses asked so far.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wrong: dict[str, str] = {}
        self.strangers: set[int] = set()
        self.asked: list[str] = []
        monkeypatch.setattr(waiting, "ask_all", self._ask_all)
        monkeypatch.setattr(waiting, "ask", lambda address, _: self.wrong.get(address))
        monkeypatch.setattr(health, "_knows_us", lambda k: k not in self.strangers)

    def _ask_all(self, asked: Sequence[str], limit: float) -> dict[str, str]:
        self.asked += asked
        return {address: self.wrong[address] for address in asked & self.wrong.keys()}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> _Servers:
    return _Servers(monkeypatch)


def test_hosts_that_answer_and_know_us_are_not_lost(servers: _Servers) -> None:
    assert health.lost(_HOSTS, 1.0) == {}
    assert servers.asked == [host.address for host in _HOSTS]


def test_who_does_not_answer_is_lost(servers: _Servers) -> None:
    servers.wrong = {"10.0.0.2:1": waiting.SILENT}
    assert health.lost(_HOSTS, 1.0) == servers.wrong


def test_a_server_that_was_started_again_is_lost(servers: _Servers) -> None:
    servers.strangers = {2}
    assert health.lost(_HOSTS, 1.0) == {"10.0.0.3:1": "its server was started again"}


def test_who_fell_silent_since_was_not_started_again(servers: _Servers) -> None:
    servers.strangers = {0}
    assert health._of_answering(0, "10.0.0.1:1", 1.0) == "its server was started again"
    servers.wrong = {"10.0.0.1:1": waiting.SILENT}
    assert health._of_answering(0, "10.0.0.1:1", 1.0) == waiting.SILENT


def test_of_whom_something_is_known_is_not_asked(servers: _Servers) -> None:
    problems = {"10.0.0.1:1": "killed"}
    assert health.lost(_HOSTS, 1.0, problems) == problems
    assert problems == {"10.0.0.1:1": "killed"}  # the caller's own is not modified
    assert servers.asked == ["10.0.0.2:1", "10.0.0.3:1"]


def test_hosts_are_called_as_the_user_does() -> None:
    problems = {"10.0.0.3:1": "silent", "10.0.0.2:1": "killed", "10.0.0.9:1": "no host"}
    assert health.describe(_HOSTS, problems) == [
        "10.0.0.2:1: killed",
        "host-c at 10.0.0.3:1: silent",
    ]


def test_a_connection_to_a_silent_host_does_not_end() -> None:
    """TensorFlow would wait for it; a connection that is gone does not block."""
    problems = {"10.0.0.2:1": "connection refused", "10.0.0.3:1": waiting.SILENT}
    with pytest.raises(replicator.ClusterError) as caught:
        health.leave(_HOSTS, problems)
    assert f"host-c at 10.0.0.3:1: {waiting.SILENT}" in str(caught.value)
    assert "10.0.0.2" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="others do not list them")
def test_leaving_hosts_that_are_off_takes_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TensorFlow reports to each host that it leaves, and waits for a connection."""
    with servers_.unanswered() as (waiting_socket, address):
        readable: list[object] = []

        def connect(*_: object) -> None:
            readable.extend(select.select([waiting_socket], [], [], 10)[0])

        token = types.SimpleNamespace(job_name="client", task_index=0)
        monkeypatch.setattr(cluster, "connection", lambda: token)
        monkeypatch.setattr(cluster, "connect", connect)
        monkeypatch.setattr(state, "own_address", lambda _: "127.0.0.1:1")
        host = description.Host("host-a", address)
        health.leave([host], {address: "no answer within 1 s"})
        assert readable
