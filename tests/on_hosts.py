# SPDX-License-Identifier: Apache-2.0
"""`pytest --hosts`: the tests' CPU:k are devices of two servers.

CPU:0, CPU:2, ... are the first server's, CPU:1, CPU:3, ... the second's, with the same
numbers as in messages; any two neighbours are on different hosts. Sessions run on them
too, with this process as the master, where Python calls run. Tests that cannot pass are
in tests/not_on_hosts.txt, with the reason, and have to fail.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import replicator
from replicator import devices
from tests import helpers, listed
from tests.cluster import servers

LIST = pathlib.Path(__file__).with_name("not_on_hosts.txt")
NUM_HOSTS = 2


@contextlib.contextmanager
def connected(num_cpus: int) -> Iterator[None]:
    """Connects this process to servers, for all tests in the block.

    Args:
        num_cpus: The number of devices of each.
    """
    with servers.serving(NUM_HOSTS, f"--cpus={num_cpus}") as server_facts:
        cluster = replicator.connect(servers.addresses(server_facts))
        local = devices.resolve
        token = helpers.SESSIONS.set(cluster.session_arguments())
        devices.resolve = lambda names: local(mapped(names, num_cpus))
        yield
        devices.resolve = local
        helpers.SESSIONS.reset(token)
        cluster.close()  # while the servers run: later, freeing resources would fail


def mapped(names: Any, num_cpus: int) -> Any:
    """Returns device names with the servers' devices in place of CPU:k."""
    if isinstance(names, list | tuple):
        return [mapped(name, num_cpus) for name in names]
    k = names.removeprefix("CPU:") if isinstance(names, str) else ""
    if k == names or not k.isdecimal() or int(k) >= num_cpus:
        return names
    return f"/job:worker/task:{int(k) % NUM_HOSTS}/device:CPU:{k}"


def mark(items: Sequence[pytest.Item]) -> None:
    """Marks the listed tests, which cannot pass there."""
    listed.mark(items, LIST, lambda why: pytest.mark.xfail(reason=why, strict=True))
