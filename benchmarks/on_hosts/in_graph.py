# SPDX-License-Identifier: Apache-2.0
"""Replicator on two hosts, and plain TensorFlow on one of them, in one program.

Run by `benchmarks.hosts` on the first host, beside the servers:
`python -m benchmarks.on_hosts.in_graph '{"hosts": [...], "client": "host:0"}'`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

import replicator
from benchmarks import allreduce, contenders, timing, workloads
from benchmarks.contenders import MIRRORED, OURS
from benchmarks.on_hosts import turns

ONE_REMOTE = "one remote device"
NOTHING_SENT = "both hosts, nothing sent"
WORKLOADS = {workload.name: workload for workload in workloads.WORKLOADS}

Make = Callable[[], timing.Run]


def steps(name: str, devices: Sequence[str]) -> dict[str, Make]:
    """Returns the factories of contenders that train a network, by name.

    Args:
        name: The network's name.
        devices: One device of each host.
    """
    workload = WORKLOADS[name]
    weights = functools.cache(lambda: contenders.initial_weights(workload))

    def one() -> timing.Run:
        # The host on which this program does not run.
        step = contenders.one_device(workload, 1, weights(), devices[-1])
        return timing.in_turn(lambda: float(step()))

    def ours(contender: str) -> timing.Run:
        step = contenders.replicated(
            workload, 2, weights(), devices, **contenders.OPTIONS[contender]
        )
        return timing.in_turn(lambda: float(step()))

    return {
        ONE_REMOTE: one,
        OURS: functools.partial(ours, OURS),
        MIRRORED: functools.partial(ours, MIRRORED),
    }


def sums(nbytes: int, devices: Sequence[str]) -> dict[str, Make]:
    """Returns the factories of all-reduce contenders, by name.

    Args:
        nbytes: The bytes of each replica's tensor.
        devices: One device of each host.
    """
    operands = functools.cache(
        lambda: allreduce.operands(nbytes, len(devices), devices)
    )

    def nothing_sent() -> timing.Run:
        # The minimum cost of a call that reaches both hosts.
        return allreduce.timed(allreduce.doubled(operands(), devices))

    def ours() -> timing.Run:
        reduce = allreduce.replicated(operands(), names=devices)
        return allreduce.checked(reduce, operands(), OURS)

    return {NOTHING_SENT: nothing_sent, OURS: ours}


def names(cells: Sequence[str], devices: Sequence[str]) -> Mapping[str, Make]:
    """Returns the factories of all runs, by "CELL/CONTENDER"."""
    factories: dict[str, Make] = {}
    for cell in cells:
        size = allreduce.SIZES.get(cell)
        of_cell = sums(size, devices) if size else steps(cell, devices)
        factories |= {
            f"{cell}/{contender}": make for contender, make in of_cell.items()
        }
    return factories


def main(arguments: str) -> None:
    """Connects, and takes turns."""
    config = json.loads(arguments)
    tf.get_logger().setLevel("ERROR")
    cluster = replicator.connect(config["hosts"], client=config["client"])
    turns.answer(names(config["cells"], cluster.devices))
    cluster.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
