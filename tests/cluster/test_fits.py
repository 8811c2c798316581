# SPDX-License-Identifier: Apache-2.0
"""Keras' fit over two hosts, with real servers: as on one device, and after faults."""

from __future__ import annotations

import json

import pytest

from tests.cluster import servers

pytestmark = pytest.mark.slow


def _found(name, *addresses):
    result = servers.run_module("tests.cluster.fits", name, *addresses, limit=900)
    return json.loads(result.stdout.splitlines()[-1])


def test_two_hosts_are_as_one_device():
    with servers.serving(2, "--cpus=2") as server_facts:
        results = _found("equal", *servers.addresses(server_facts))
    assert len(results) == 2
    for one_each, two_each in results.values():
        assert set(one_each["replicas"]) == {2}  # all variables are mirrored
        assert set(two_each["replicas"]) == {4}
        for compared in (one_each, two_each):
            assert compared["error"] < 1e-5
            assert compared["differ"] == 0  # bitwise


def test_a_backup_is_resumed_after_a_server_was_killed():
    results = _found("resumed")
    plain = results["plain"]
    assert sorted(plain) == ["0", "1", "2", "3", "4"]
    assert all(len(losses) == 1 for losses in plain.values())
    assert len(results["faults"]) == 4
    for which, moment, fault in results["faults"]:
        assert fault["named"], (which, moment, fault["errors"])
        # One epoch may have ended, and be lost with its backup, but not its loss.
        assert sum(map(len, fault["losses"].values())) <= 6
        assert {k: set(v) for k, v in fault["losses"].items()} == {
            k: set(v) for k, v in plain.items()
        }
