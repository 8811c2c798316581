# SPDX-License-Identifier: Apache-2.0
"""resilient: a training that goes on after hosts were lost."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

from absl import logging

from replicator import _tf, errors
from replicator.cluster import connection, faults, sources
from replicator.cluster.cluster import Cluster

_AT_ONCE = 2.0  # seconds for one attempt: meanwhile the launcher may give up a host


def resilient(
    train: Callable[[Cluster], Any],
    hosts: Any = None,
    *,
    max_restarts: int = 10,
    timeout: float = 60.0,
    heartbeat: float | None = None,
    client: str | None = None,
) -> Any:
    """Connects and calls a function; after a host was lost, once more.

    What is on a lost host is gone, so `train` has to make everything anew: the
    Replicator, the model, the optimizer, the datasets; `cluster.checkpoint` restores
    them. It has the losses of a run without a fault, then. `python -m
    replicator.launch --max-restarts=3` starts the servers of lost hosts again; those
    that somebody else starts again must listen where they did.

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
        hosts: As of `connect`.
        max_restarts: How many times it is called again.
        timeout: As of `connect`; also after each fault, for hosts to come back.
        heartbeat: As of `connect`.
        client: As of `connect`.

    Returns:
        What `train` returned.

    Raises:
        HostLostError: Hosts were lost once more than that; in between-graph mode, once.
        ClusterError: A host did not come back in time; otherwise as `connect`.
    """
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int):
        raise errors.ArgumentError(
            errors.compose(
                f"resilient was given max_restarts={errors.shown(max_restarts)}.",
                fix="pass how many times train may be called again.",
            )
        )
    if hosts is None:
        sources.announce_resilience(os.environ)
    options = {"heartbeat": heartbeat, "client": client}
    cluster = connection.connect(hosts, timeout=timeout, **options)
    restarts = 0
    while True:
        try:
            result = train(cluster)
            break
        except Exception as error:
            found = faults.lost(error)
            if found is None:
                raise
            if restarts >= max_restarts or _tf.joined() is not None:
                raise found from error
            _let_go(error)
        restarts += 1
        logging.warning("%s Connecting again, %d of %d.", found, restarts, max_restarts)
        cluster = _connect(cluster, hosts, timeout, options)
    cluster.close()
    return result


def _let_go(error: BaseException | None) -> None:
    """Lets go of what the frames of an error hold: variables of lost hosts."""
    seen = 0
    while error is not None and seen < 10:
        traceback.clear_frames(error.__traceback__)
        error, seen = error.__cause__ or error.__context__, seen + 1
    gc.collect()


def _connect(
    before: Cluster, hosts: Any, timeout: float, options: dict[str, Any]
) -> Cluster:
    """Connects anew, to whichever hosts there are by the time they all answer."""
    until = time.monotonic() + timeout
    while True:
        left = until - time.monotonic()
        try:
            before.close()  # hosts that were only silent, or cut off, still know us
            return connection.connect(
                hosts, timeout=max(0.1, min(_AT_ONCE, left)), **options
            )
        except errors.ClusterError:
            if left <= _AT_ONCE:
                raise
            time.sleep(0.2)
