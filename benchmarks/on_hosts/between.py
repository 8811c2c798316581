# SPDX-License-Identifier: Apache-2.0
"""Replicator on two hosts, each with a program that builds a graph of its own.

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
    """Returns what trains a network.

    Args:
        name: Of the network.
        devices: Those of all hosts.
    """
    workload = WORKLOADS[name]
    weights = contenders.initial_weights(workload)
    step = contenders.replicated(workload, len(devices), weights, devices)
    return timing.in_turn(lambda: float(step()))


def sums(nbytes: int, devices: Sequence[str]) -> timing.Run:
    """Returns what adds up a tensor of each host.

    Args:
        nbytes: Of each.
        devices: Those of all hosts.
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
    """Returns all that can be run: "CELL/CONTENDER"."""
    made = {}
    for cell in cells:
        size = allreduce.SIZES.get(cell)
        run = (
            functools.partial(sums, size, devices)
            if size
            else functools.partial(steps, cell, devices)
        )
        made[f"{cell}/{BETWEEN}"] = run
    return made


def main(arguments: str) -> None:
    """Joins the others, and takes turns."""
    given = json.loads(arguments)
    tf.get_logger().setLevel("ERROR")
    cluster = replicator.connect(given["hosts"], task=given["task"])
    turns.answer(names(given["cells"], cluster.devices))


if __name__ == "__main__":
    main(*sys.argv[1:])
