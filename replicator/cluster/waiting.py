# SPDX-License-Identifier: Apache-2.0
"""Whether servers are there: asks them over TCP, before TensorFlow would wait for ever.

TensorFlow's own connecting has no time limit: where a host does not answer, it never
returns. So each is asked first, by the first bytes of HTTP/2, which gRPC speaks:
whoever answers with settings listens and is not stopped.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence

from replicator.cluster import addresses, lifeline

_MOST_AT_ONCE = 64
_PAUSE = 0.2  # seconds between two rounds
_PROGRESS = 5.0  # seconds between two lines

SILENT = lifeline.SILENT


def ask(address: str, limit: float, stay: float = 0.0) -> str | None:
    """Returns what is wrong with a server, None if it answers.

    Args:
        address: "host:port".
        limit: Seconds that it may take.
        stay: As `lifeline.ask` has it.
    """
    host, port = addresses.split(address)
    return lifeline.ask(host, port or 0, limit, stay)


def ask_all(asked: Sequence[str], limit: float) -> dict[str, str]:
    """Returns what is wrong with each server that does not answer.

    Args:
        asked: Addresses, "host:port".
        limit: Seconds that each may take.
    """
    if not asked:
        return {}
    with concurrent.futures.ThreadPoolExecutor(min(len(asked), _MOST_AT_ONCE)) as pool:
        answers = pool.map(lambda address: ask(address, limit), asked)
        found = zip(asked, answers, strict=True)
    return {address: problem for address, problem in found if problem is not None}


def wait_for(
    asked: Sequence[str],
    limit: float,
    silence: float,
    progress: Callable[[Mapping[str, str], float], None],
) -> dict[str, str]:
    """Waits until all servers answer; returns what is wrong with those that do not.

    Args:
        asked: Addresses, "host:port".
        limit: Seconds in all.
        silence: Seconds that one may take to answer.
        progress: Called now and then with what is wrong with those that are missing,
            and the seconds that have passed.
    """
    began = told = time.monotonic()
    left = list(asked)
    while True:
        remaining = began + limit - time.monotonic()
        problems = ask_all(left, max(0.05, min(silence, remaining)))
        left = list(problems)
        now = time.monotonic()
        if not left or now - began >= limit:
            return problems
        if now - told >= _PROGRESS:
            told = now
            progress(problems, now - began)
        time.sleep(min(_PAUSE, max(0.0, began + limit - now)))
