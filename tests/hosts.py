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
import tensorflow as tf

import replicator
from replicator import _tf, devices
from tests import helpers, servers

LIST = pathlib.Path(__file__).with_name("not_on_hosts.txt")
NUM_HOSTS = 2


@contextlib.contextmanager
def connected(num_cpus: int) -> Iterator[None]:
    """Connects this process to servers, for all tests in the block.

    Args:
        num_cpus: How many devices each of them has.
    """
    with servers.started(NUM_HOSTS, num_cpus) as addresses:
        cluster = replicator.connect(addresses)
        local = devices.resolve
        token = helpers.SESSIONS.set(_session_arguments(addresses))
        devices.resolve = lambda names: local(_mapped(names, num_cpus))
        yield
        devices.resolve = local
        helpers.SESSIONS.reset(token)
        cluster.close()  # while they are there; what is freed later would miss them


def _mapped(names: Any, num_cpus: int) -> Any:
    """Returns names of devices with those of the servers in place of CPU:k."""
    if isinstance(names, list | tuple):
        return [_mapped(name, num_cpus) for name in names]
    k = names.removeprefix("CPU:") if isinstance(names, str) else ""
    if k == names or not k.isdecimal() or int(k) >= num_cpus:
        return names
    return f"/job:worker/task:{int(k) % NUM_HOSTS}/device:CPU:{k}"


def _session_arguments(addresses: Sequence[str]) -> dict[str, Any]:
    """Returns what a session is made with that runs on the servers, from here."""
    token = _tf.connection()
    (own,) = tf.train.ClusterSpec(token.cluster).job_tasks("client")
    # No server may have the name there that it was started with.
    jobs = {"worker": list(addresses), "master": [own]}
    config = tf.compat.v1.ConfigProto()
    config.cluster_def.CopyFrom(tf.train.ClusterSpec(jobs).as_cluster_def())
    return {"target": f"grpc://{own}", "config": config}


def mark(items: Sequence[pytest.Item]) -> None:
    """Marks the tests that cannot pass there, which are listed."""
    reasons = _read()
    for item in items:
        function = item.nodeid.partition("[")[0]
        for name in (item.nodeid, function, function.partition("::")[0]):
            if name in reasons:
                reason = reasons[name]
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
                break


def _read() -> dict[str, str]:
    """Returns the reason of each test that is listed."""
    reasons, reason = {}, ""
    for line in LIST.read_text().splitlines():
        if line.startswith("[") and line.endswith("]"):
            reason = line.strip("[]")
        elif line and not line.startswith("#"):
            reasons[line] = reason
    return reasons
