# SPDX-License-Identifier: Apache-2.0
"""Devices that need not exist, if this is stated."""

from __future__ import annotations

import pytest

import replicator
from replicator.costs import paper


def test_each_host_has_the_devices_that_are_named() -> None:
    with paper.on_paper(2):
        repl = replicator.Replicator(["GPU:0", "GPU:7"])
    assert repl.devices == tuple(
        f"/job:worker/replica:0/task:{host}/device:GPU:{k}"
        for host in (0, 1)
        for k in (0, 7)
    )


def test_devices_of_hosts_are_as_they_are() -> None:
    names = [f"/job:worker/replica:0/task:{k}/device:CPU:0" for k in (3, 5)]
    with paper.on_paper(1):
        assert replicator.Replicator(names).devices == tuple(names)


def test_elsewhere_devices_must_exist() -> None:
    with paper.on_paper(3):
        pass
    assert not paper.is_on()
    with pytest.raises(replicator.errors.DeviceError, match="GPU:7"):
        replicator.Replicator(["GPU:7"])
