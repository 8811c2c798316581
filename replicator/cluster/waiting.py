# SPDX-License-Identifier: Apache-2.0
"""Probes servers over TCP before TensorFlow connects to them.

TensorFlow connects without a time limit: if a host does not answer, the call never
returns. So each host is probed first with the first bytes of HTTP/2, the protocol of
gRPC: a server that answers with its settings listens and is not stopped.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable, Mapping, Sequence

from replicator import errors
from replicator.cluster import addresses, lifeline

_MOST_AT_ONCE = 64
_PAUSE = 0.2  # seconds between two rounds of probes
_PROGRESS = 5.0  # seconds between two progress reports

SILENT = lifeline.SILENT
# The environment variable with the seconds for which the programs of between-graph mode
# wait for the slowest of them, which may have to prepare its inputs.
PATIENCE, _PATIENCE = "REPLICATOR_PATIENCE", 600.0


def patience() -> float:
    """Returns for how many seconds a program waits for another to build the same.

    Raises:
        ArgumentError: The environment variable is not a number.
    """
    text = os.environ.get(PATIENCE, str(_PATIENCE))
    try:
        return float(text)
    except ValueError:
        raise errors.ArgumentError(
            f"{PATIENCE}={text!r} is not a number.",
            fix=f"set {PATIENCE} to a number of seconds.",
        ) from None


def ask(address: str, limit: float, stay: float = 0.0) -> str | None:
    """Returns what is wrong with a server; None if it answers.

    Args:
        address: "host:port".
        limit: Timeout in seconds.
        stay: See `lifeline.ask`.
    """
    host, port = addresses.split(address)
    return lifeline.ask(host, port or 0, limit, stay)


def ask_all(addresses: Sequence[str], limit: float) -> dict[str, str]:
    """Returns what is wrong with each server that does not answer, by address.

    Args:
        addresses: Addresses, "host:port".
        limit: Timeout per server in seconds.
    """
    if not addresses:
        return {}
    with concurrent.futures.ThreadPoolExecutor(
        min(len(addresses), _MOST_AT_ONCE)
    ) as pool:
        answers = pool.map(lambda address: ask(address, limit), addresses)
        problems = zip(addresses, answers, strict=True)
    return {address: problem for address, problem in problems if problem is not None}


def wait_for(
    addresses: Sequence[str],
    limit: float,
    silence: float,
    progress: Callable[[Mapping[str, str], float], None],
) -> dict[str, str]:
    """Waits until all servers answer; returns what is wrong with those that do not.

    Args:
        addresses: Addresses, "host:port".
        limit: How many seconds to wait in all.
        silence: Timeout of one probe in seconds.
        progress: Called at intervals with the problems of the missing servers, by
            address, and the seconds elapsed.
    """
    start = last_report = time.monotonic()
    missing = list(addresses)
    while True:
        remaining = start + limit - time.monotonic()
        problems = ask_all(missing, max(0.05, min(silence, remaining)))
        missing = list(problems)
        now = time.monotonic()
        if not missing or now - start >= limit:
            return problems
        if now - last_report >= _PROGRESS:
            last_report = now
            progress(problems, now - start)
        time.sleep(min(_PAUSE, max(0.0, start + limit - now)))
