# SPDX-License-Identifier: Apache-2.0
"""`resilient` restarts training after hosts are lost."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from absl import logging

from replicator import errors
from replicator._tf import cluster as tf_cluster
from replicator.cluster import faults, sources
from replicator.hosts import connection
from replicator.hosts.cluster import Cluster

# Seconds per attempt; short, because the launcher may drop a host between attempts.
_AT_ONCE = 2.0

_Result = TypeVar("_Result")


def resilient(
    train: Callable[[Cluster], _Result],
    hosts: Any = None,
    *,
    max_restarts: int = 10,
    timeout: float = 60.0,
    heartbeat: float | None = None,
    client: str | None = None,
) -> _Result:
    """Connects to a cluster and calls `train`, again after each loss of a host.

    State on a lost host is gone, so `train` must create everything from scratch: the
    Replicator, the model, the optimizer and the datasets. `cluster.checkpoint` then
    restores them, and the losses match those of a run without faults. `python -m
    replicator.launch --max-restarts=3` restarts the servers of lost hosts; servers
    restarted by other means must listen at their previous addresses.

    Example:
        >>> def train(cluster):
        ...     repl = replicator.Replicator(cluster.devices)
        ...     with repl.context():
        ...         v = tf.Variable(0.0)
        ...     checkpoint = cluster.checkpoint("checkpoints", v=v)
        ...     for step in checkpoint.steps(10, every=5):
        ...         repl.run(lambda: v.assign_add(1.0))
        ...     return float(v)
        >>> replicator.resilient(train, addresses)
        10.0

    Args:
        train: Called with the Cluster.
        hosts: See `connect`.
        max_restarts: The maximum number of times that `train` is called again.
        timeout: See `connect`; also how long to wait for hosts after each fault.
        heartbeat: See `connect`.
        client: See `connect`.

    Returns:
        The return value of `train`.

    Raises:
        HostLostError: Hosts were lost more than `max_restarts` times; in between-graph
            mode, once.
        ClusterError: A host did not come back in time, or `connect` raised it.
    """
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int):
        raise errors.ArgumentError(
            f"resilient was given max_restarts={errors.repr_of(max_restarts)}.",
            fix="pass how many times train may be called again.",
        )
    if hosts is None:
        sources.announce_resilience(os.environ)
    options: dict[str, Any] = {"heartbeat": heartbeat, "client": client}
    cluster = connection.connect(hosts, timeout=timeout, **options)
    restarts = 0
    while True:
        try:
            result = train(cluster)
            break
        except Exception as error:
            host_error = faults.lost(error)
            if host_error is None:
                raise
            if restarts >= max_restarts or tf_cluster.joined() is not None:
                raise host_error from error
            _let_go(error)
        restarts += 1
        logging.warning(
            "%s Connecting again, %d of %d.", host_error, restarts, max_restarts
        )
        cluster = _connect(cluster, hosts, timeout, options)
    cluster.close()
    return result


def _let_go(error: BaseException | None) -> None:
    """Clears an error's frames, which hold references to variables on lost hosts."""
    depth = 0
    while error is not None and depth < 10:
        traceback.clear_frames(error.__traceback__)
        error, depth = error.__cause__ or error.__context__, depth + 1
    gc.collect()


def _connect(
    cluster: Cluster, hosts: Any, timeout: float, options: dict[str, Any]
) -> Cluster:
    """Reconnects, looking up the current hosts again at each attempt."""
    deadline = time.monotonic() + timeout
    while True:
        remaining = deadline - time.monotonic()
        try:
            # Hosts that were only silent or cut off still hold the old connection.
            cluster.close()
            return connection.connect(
                hosts, timeout=max(0.1, min(_AT_ONCE, remaining)), **options
            )
        except errors.ClusterError:
            if remaining <= _AT_ONCE:
                raise
            time.sleep(0.2)
