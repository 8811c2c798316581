# SPDX-License-Identifier: Apache-2.0
"""Checks the hosts of a connection, and closes it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from replicator import errors
from replicator._tf import cluster
from replicator.cluster import cutting, description, state, waiting, watch

_CUTS = 0.1  # seconds between two looks for connections to hosts that are lost
CHANNELS = 2  # per server; two transfer a third more than one, and more add nothing
START = (
    "start `python -m replicator.serve` on each host, or the whole program with "
    "`python -m replicator.launch`"
)


def lost(
    hosts: Sequence[description.Host],
    silence: float,
    known_problems: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the problem of each host that does not answer or no longer knows us.

    Args:
        hosts: The hosts of the connection, in task order.
        silence: How many seconds each host may take to answer.
        known_problems: Known problems, by host address; these hosts are not probed.

    Returns:
        All problems, by host address.
    """
    problems = dict(known_problems or {})
    addresses = [host.address for host in hosts if host.address not in problems]
    problems |= waiting.ask_all(addresses, silence)
    for k, host in enumerate(hosts):
        if host.address not in problems:
            problem = _of_answering(k, host.address, silence)
            if problem is not None:
                problems[host.address] = problem
    return problems


def _of_answering(task: int, address: str, silence: float) -> str | None:
    """Returns what is wrong with a host that has answered; None if it knows us.

    If the host has fallen silent since, the watch cuts the connection, which must not
    be mistaken for the refusal of a restarted server. So the host is probed once more.
    """
    if _knows_us(task):
        return None
    problem = waiting.ask(address, silence)
    if problem is not None or _knows_us(task):
        return problem
    return "its server was started again"


def _knows_us(task: int) -> bool:
    """Whether a server that answers is the one to which this process connected."""
    # In a thread of its own, which executes eagerly: the caller may be building a graph
    # that must not change, or that is finalized.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(_computes, task).result()


def _computes(task: int) -> bool:
    try:
        with tf.device(f"/job:{state.WORKER}/task:{task}/device:CPU:0"):
            tf.identity(0)  # fails on a restarted server, which has no such client
    except tf.errors.OpError:
        return False
    return True


def describe(
    hosts: Sequence[description.Host], problems: Mapping[str, str]
) -> list[str]:
    """Returns one line per host with a problem, which names the host as the user did.

    Args:
        hosts: All hosts.
        problems: The problems, by host address.
    """
    lines = []
    for host in hosts:
        if host.address in problems:
            at = "" if host.name == host.address else f" at {host.address}"
            lines.append(f"{host.name}{at}: {problems[host.address]}")
    return lines


def leave(hosts: Sequence[description.Host], problems: Mapping[str, str]) -> None:
    """Closes the current connection.

    Args:
        hosts: Its hosts.
        problems: The problems, by host address.

    Raises:
        ClusterError: A host is silent, and TensorFlow would wait for it.
    """
    silent = {a: p for a, p in problems.items() if p == waiting.SILENT}
    if silent:
        raise errors.ClusterError(
            "the connection cannot be closed while a host is silent.",
            [*describe(hosts, silent), f"at {errors.user_line()}"],
            "end its process, with SIGKILL if it is stopped; then try again.",
        )
    connection = cluster.connection()
    job, task = connection.job_name, connection.task_index
    watchers = watch.watchers()  # unblock the next call if a host falls silent
    with _cut_off([host.address for host in hosts if host.address in problems]):
        cluster.connect(
            {job: {task: state.own_address(connection)}}, job, task, CHANNELS
        )
    for watcher in watchers:
        watcher.end()


@contextlib.contextmanager
def _cut_off(addresses: Sequence[str]) -> Iterator[None]:
    """Ends attempts, in this block, to connect to hosts that are lost.

    TensorFlow reports to every host that it leaves. If one is off, it would wait 20
    seconds for a connection, and no watcher knows the one that it leaves.
    """
    over = threading.Event()

    def cut() -> None:
        while not over.wait(_CUTS):
            for address in addresses:
                cutting.cut(address)

    thread = threading.Thread(target=cut, daemon=True)
    if addresses:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if addresses:
            thread.join()
