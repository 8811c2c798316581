# SPDX-License-Identifier: Apache-2.0
"""Steps under every strategy: `python -m benchmarks.strategies [--only=small,wide]`.

Builder by network: the time of a step, and the bytes that its plan says are
communicated. Each network is measured in a process of its own, in which the builders
take turns.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import app

from benchmarks import cli, contenders, results, timing, workloads
from benchmarks.contenders import BASELINE
from benchmarks.tables import Table, milliseconds, size
from replicator import strategy

NAME = "strategies"
WARM_UP = 5  # steps before timing, whose losses are compared
REPLICAS = 2
BUILDERS: Mapping[str, Callable[[], strategy.Builder]] = {
    made.__name__: made
    for made in (
        strategy.Mirrored,
        strategy.Sharded,
        strategy.PS,
        strategy.PSLoadBalancing,
        strategy.PartitionedPS,
        strategy.UnevenPartitionedPS,
        strategy.AllReduce,
        strategy.PartitionedAR,
        strategy.RandomAxisPartitionAR,
        strategy.Parallax,
        strategy.Auto,
    )
}
NETWORKS = {workload.name: workload for workload in workloads.WORKLOADS}
# Half as many as elsewhere: there are more than twice as many contenders.
STEPS = {name: max(20, one.steps // 2) for name, one in NETWORKS.items()}


def measure(workload: workloads.Workload) -> dict[str, dict[str, Any]]:
    """Measures all builders on one workload.

    Returns:
        By builder, a Measured as a dict, and what `planned` returns; that of one device
        has no such thing.
    """
    weights = contenders.initial_weights(workload)
    built = {
        name: contenders.built(workload, REPLICAS, weights, strategy=make())
        for name, make in BUILDERS.items()
    }
    prepared: dict[str, timing.Run] = {
        BASELINE: timing.in_turn(contenders.one_device(workload, REPLICAS, weights)),
        **{n: timing.in_turn(functools.partial(_first, s)) for n, s in built.items()},
    }
    steps = cli.steps(STEPS[workload.name])
    measured = timing.measure(prepared, steps, cli.rounds(), WARM_UP)
    # Replicas normalize by their own examples.
    alike = list(built) if workload.batch_norm else list(measured)
    if not timing.agree(measured, alike):
        losses = {name: measured[name].losses for name in alike}
        cli.fail(f"{workload.title}: builders compute different losses, {losses}")
    return {
        name: dataclasses.asdict(one) | (planned(built[name]) if name in built else {})
        for name, one in measured.items()
    }


def _first(step: Callable[[], Any]) -> tf.Tensor:
    """Runs a step; returns what replica 0 returns."""
    return step()[0]


def planned(step: Any) -> dict[str, int]:
    """Returns what a step communicates, as its plan says.

    Args:
        step: Was called.

    Returns:
        The "nbytes" that travel, of loops and conditionals those of one turn, and how
        many communications there are whose size is "unknown" before they happen.
    """
    totals = step.plan.totals
    both = totals.per_step, totals.per_turn
    return {
        "nbytes": sum(total.nbytes for total in both),
        "unknown": sum(total.unknown for total in both),
    }


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the tables of step times and of bytes.

    Args:
        found: `found[workload][builder]` is what `measure` returns of it.
    """
    measured = {
        network: {name: timing.Measured.from_json(one) for name, one in by_name.items()}
        for network, by_name in found.items()
    }
    titles = [NETWORKS[network].title for network in found]
    names = [name for name in BUILDERS if all(name in own for own in found.values())]
    times = [
        [name, *(_time(by_name, name, names) for by_name in measured.values())]
        for name in names
    ]
    alone = [
        BASELINE,
        *(milliseconds(by_name[BASELINE].median) for by_name in measured.values()),
    ]
    noise = ["noise", *(f"{own[BASELINE].spread:.1%}" for own in measured.values())]
    nbytes = [[name, *(_sent(own[name]) for own in found.values())] for name in names]
    return [
        Table(
            "Median step under each strategy, in ms",
            ["", *titles],
            [alone, *times, noise],
            f"{REPLICAS} replicas. In brackets: of the fastest builder's time, as the "
            "median over rounds.",
        ),
        Table(
            "Bytes communicated in a step under each strategy",
            ["", *titles],
            nbytes,
            "As the plan says: what is reduced, gathered and broadcast, not what is "
            "read where it is. In loops, of one turn. With +, there are communications "
            "whose size is known only when they happen.",
        ),
    ]


def _time(by_name: Mapping[str, timing.Measured], name: str, names: list[str]) -> str:
    fastest = min(names, key=lambda one: by_name[one].median)
    ratio = timing.ratio(by_name[name], by_name[fastest])
    return f"{milliseconds(by_name[name].median)} ({ratio:.2f})"


def _sent(one: Mapping[str, Any]) -> str:
    return size(one["nbytes"]) + ("+" if one["unknown"] else "")


def main(argv: list[str]) -> None:
    """Measures what the flags ask for, prints the tables and writes the JSON file."""
    cli.refuse_arguments(argv)
    if cli.CELL.value is not None:
        contenders.split_cpu(REPLICAS)
        (name,) = cli.choose([cli.CELL.value], NETWORKS)
        print(json.dumps(measure(NETWORKS[name])))
        return
    chosen = cli.chosen(NETWORKS)
    about = results.facts()
    given = cli.handed_on(cli.QUICK, cli.STEPS, cli.ROUNDS)
    found = {}
    for name in chosen:
        cli.progress(f"strategies: measuring {NETWORKS[name].title} ...")
        found[name] = cli.apart("benchmarks.strategies", f"--cell={name}", *given)
    cli.finish(NAME, about, found, tables(found))


if __name__ == "__main__":
    app.run(main)
