# SPDX-License-Identifier: Apache-2.0
"""Replicator on two hosts, each running a program that builds its own graph.

Run by `benchmarks.hosts` on each host:
`python -m benchmarks.on_hosts.between '{"hosts": [...], "task": 0, "cells": [...]}'`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

import replicator
from benchmarks import allreduce, cli, contenders, timing
from benchmarks.on_hosts import turns
from benchmarks.on_hosts.in_graph import WORKLOADS

BETWEEN = "Replicator, between-graph"


def steps(name: str, devices: Sequence[str]) -> timing.Run:
    """Returns a run that trains a network.

    Args:
        name: The network's name.
        devices: The devices of all hosts.
    """
    workload = WORKLOADS[name]
    weights = contenders.initial_weights(workload)
    step = contenders.replicated(workload, len(devices), weights, devices)
    return timing.in_turn(lambda: float(step()))


def sums(nbytes: int, devices: Sequence[str]) -> timing.Run:
    """Returns a run that sums one tensor per host.

    Args:
        nbytes: The bytes of each tensor.
        devices: The devices of all hosts.
    """
    repl = replicator.Replicator(devices)

    def input_fn(ctx: replicator.InputContext) -> tf.Tensor:
        with tf.device(devices[ctx.replica_id]):
            return tf.fill([nbytes // 4], 2.0**ctx.replica_id)

    reduce = repl.build(lambda x: repl.all_reduce(x), input_fn)
    for result in reduce():
        if not np.all(result.numpy() == 2.0 ** len(devices) - 1):
            cli.fail(f"{BETWEEN} gives a wrong sum of {nbytes} bytes")

    def step() -> float:
        reduce()
        return 0.0  # there is no loss

    return timing.in_turn(step)


def names(
    cells: Sequence[str], devices: Sequence[str]
) -> Mapping[str, Callable[[], timing.Run]]:
    """Returns the factories of all runs, by "CELL/CONTENDER"."""
    factories = {}
    for cell in cells:
        size = allreduce.SIZES.get(cell)
        run = (
            functools.partial(sums, size, devices)
            if size
            else functools.partial(steps, cell, devices)
        )
        factories[f"{cell}/{BETWEEN}"] = run
    return factories


def main(arguments: str) -> None:
    """Joins the other hosts, and takes turns."""
    config = json.loads(arguments)
    tf.get_logger().setLevel("ERROR")
    cluster = replicator.connect(config["hosts"], task=config["task"])
    turns.answer(names(config["cells"], cluster.devices))


if __name__ == "__main__":
    main(*sys.argv[1:])
