# SPDX-License-Identifier: Apache-2.0
"""`pytest --hosts`: the tests' CPU:k are devices of two servers.

CPU:0, CPU:2, ... are the first server's, CPU:1, CPU:3, ... the second's, by the same
numbers, which messages name; any two neighbours are on different hosts. Sessions run on
them too, with this process as the master: what calls Python is there. What cannot pass
is in tests/not_on_hosts.txt, with the reason, and has to fail.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import replicator
from replicator import devices
from tests import helpers
from tests.cluster import servers

LIST = pathlib.Path(__file__).with_name("not_on_hosts.txt")
NUM_HOSTS = 2


@contextlib.contextmanager
def connected(num_cpus: int) -> Iterator[None]:
    """Connects this process to servers, for all tests in the block.

    Args:
        num_cpus: How many devices each of them has.
    """
    with servers.serving(NUM_HOSTS, f"--cpus={num_cpus}") as told:
        cluster = replicator.connect(servers.addresses(told))
        local = devices.resolve
        token = helpers.SESSIONS.set(cluster.session_arguments())
        devices.resolve = lambda names: local(mapped(names, num_cpus))
        yield
        devices.resolve = local
        helpers.SESSIONS.reset(token)
        cluster.close()  # while they are there; what is freed later would miss them


def mapped(names: Any, num_cpus: int) -> Any:
    """Returns names of devices with those of the servers in place of CPU:k."""
    if isinstance(names, list | tuple):
        return [mapped(name, num_cpus) for name in names]
    k = names.removeprefix("CPU:") if isinstance(names, str) else ""
    if k == names or not k.isdecimal() or int(k) >= num_cpus:
        return names
    return f"/job:worker/task:{int(k) % NUM_HOSTS}/device:CPU:{k}"


def mark(items: Sequence[pytest.Item]) -> None:
    """Marks the tests that cannot pass there, which are listed."""
    reasons = listed()
    for item in items:
        function = item.nodeid.partition("[")[0]
        for name in (item.nodeid, function, function.partition("::")[0]):
            if name in reasons:
                reason = reasons[name]
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
                break


def listed() -> dict[str, str]:
    """Returns the reason of each test that is listed."""
    reasons, reason = {}, ""
    for line in LIST.read_text().splitlines():
        if line.startswith("[") and line.endswith("]"):
            reason = line.strip("[]")
        elif line and not line.startswith("#"):
            reasons[line] = reason
    return reasons
