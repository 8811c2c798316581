# SPDX-License-Identifier: Apache-2.0
"""The hosts of devices."""

from __future__ import annotations

import pytest

from replicator.costs import hosts as places
from replicator.costs import rates
from tests import paper_hosts


def test_the_host_of_a_device() -> None:
    device = "/job:worker/replica:0/task:12/device:GPU:3"
    assert places.host_of(device) == "/job:worker/replica:0/task:12"


def test_the_cpu_of_a_device() -> None:
    host = "/job:worker/replica:0/task:12/device:"
    assert places.cpu_of(f"{host}CPU:3") == f"{host}CPU:3"
    assert places.cpu_of(f"{host}GPU:3") == f"{host}CPU:0"


@pytest.mark.parametrize(
    "layout", [(0,), (0, 0), *paper_hosts.LAYOUTS, (2, 0, 2)], ids=str
)
def test_each_device_is_on_one_host(layout: tuple[int, ...]) -> None:
    devices = paper_hosts.names(layout)
    actual = places.by_host(devices)
    assert sorted(n for replica_ids in actual for n in replica_ids) == list(
        range(len(layout))
    )
    for replica_ids in actual:
        assert replica_ids == [
            n for n, host in enumerate(layout) if host == layout[replica_ids[0]]
        ]
    assert [replica_ids[0] for replica_ids in actual] == sorted(
        replica_ids[0] for replica_ids in actual
    )
    several, counts = len(set(layout)) > 1, map(layout.count, layout)
    assert places.are_several(devices) is several
    assert (rates.kind_of(devices) == "hosts") is several
    assert places.in_levels(devices) is (several and max(counts) > 1)
