# SPDX-License-Identifier: Apache-2.0
"""Whether the hosts of a connection are still there, and how it ends."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence

import tensorflow as tf

from replicator import _tf, errors
from replicator.cluster import description, state, waiting, watch

CHANNELS = 2  # to each server; two carry a third more than one, more bring nothing
START = (
    "start `python -m replicator.serve` on each host, or the whole program by "
    "`python -m replicator.launch`"
)


def lost(
    hosts: Sequence[description.Host],
    silence: float,
    known: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns what is wrong with each host that does not answer or knows us no more.

    Args:
        hosts: Those of the connection, in the order of their tasks.
        silence: Seconds that each may take to answer.
        known: What is known to be wrong with some, who are not asked.

    Returns:
        By their addresses.
    """
    problems = dict(known or {})
    asked = [host.address for host in hosts if host.address not in problems]
    problems |= waiting.ask_all(asked, silence)
    for k, host in enumerate(hosts):
        if host.address not in problems:
            problem = _of_answering(k, host.address, silence)
            if problem is not None:
                problems[host.address] = problem
    return problems


def _of_answering(task: int, address: str, silence: float) -> str | None:
    """Returns what is wrong with a host that has answered, None if it knows us.

    It may have fallen silent since, whereupon the watch cuts the connection: that is
    not the refusal of a server that was started again.
    """
    if _knows_us(task):
        return None
    problem = waiting.ask(address, silence)
    if problem is not None or _knows_us(task):
        return problem
    return "its server was started again"


def _knows_us(task: int) -> bool:
    """Whether a server that answers is the one to which this process connected."""
    # In a thread of its own, which executes eagerly: here a graph may be being built,
    # to which nothing must be added, or which is finalized.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_computes, task).result()


def _computes(task: int) -> bool:
    try:
        with tf.device(f"/job:{state.WORKER}/task:{task}/device:CPU:0"):
            tf.identity(0)  # a server that was started again has no such client
    except tf.errors.OpError:
        return False
    return True


def told(hosts: Sequence[description.Host], problems: Mapping[str, str]) -> list[str]:
    """Returns a line for each host with a problem, which names it as the user did.

    Args:
        hosts: All of them.
        problems: What is wrong with some, by their addresses.
    """
    lines = []
    for host in hosts:
        if host.address in problems:
            at = "" if host.name == host.address else f" at {host.address}"
            lines.append(f"{host.name}{at}: {problems[host.address]}")
    return lines


def leave(hosts: Sequence[description.Host], problems: Mapping[str, str]) -> None:
    """Ends the connection that there is.

    Args:
        hosts: Its hosts.
        problems: What is wrong with some, by their addresses.

    Raises:
        ClusterError: One is silent, and TensorFlow would wait for it.
    """
    silent = {a: p for a, p in problems.items() if p == waiting.SILENT}
    if silent:
        raise errors.ClusterError(
            errors.compose(
                "the connection cannot be ended while a host is silent.",
                [*told(hosts, silent), f"at {errors.user_line()}"],
                "end its process, by SIGKILL if it is stopped; then try again.",
            )
        )
    made = _tf.connection()
    job, task = made.job_name, made.task_index
    watchers = watch.watchers()  # which free what follows, should a host fall silent
    _tf.connect({job: {task: state.own_address(made)}}, job, task, CHANNELS)
    for watcher in watchers:
        watcher.end()
