# SPDX-License-Identifier: Apache-2.0
"""Steps under every strategy: `python -m benchmarks.strategies [--only=small,wide]`.

Tables of builders by networks: the step time, the bytes that the plan says are
communicated, and the strategy's prediction. Each network is measured in its own
process, with TensorFlow's oneDNN kernels and without; the builders take turns in it.
Several builders may derive the same strategy: their difference is noise.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf
from absl import app

import replicator
from benchmarks import cli, contenders, results, steps, timing, workloads
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
AUTO = strategy.Auto.__name__
# Twice as many as elsewhere, with half of the steps: among more than twice as many
# contenders, the least disturbed one must not appear the fastest.
ROUNDS = 2
STEPS = {name: max(30, one.steps // 2) for name, one in NETWORKS.items()}


def measure(
    workload: workloads.Workload, count: int, names: Iterable[str] = tuple(BUILDERS)
) -> dict[str, dict[str, Any]]:
    """Measures builders on one workload.

    Args:
        workload: The workload to train.
        count: How many steps of each are timed.
        names: The builders.

    Returns:
        By builder, a Measured as a dict, the result of `planned`, and the "predicted"
        seconds; the single device has only the first.
    """
    weights = contenders.initial_weights(workload)
    replicators, built = {}, {}
    for name in names:
        replicators[name], built[name] = contenders.made(
            workload, REPLICAS, weights, strategy=BUILDERS[name]()
        )
    prepared: dict[str, timing.Run] = {
        BASELINE: timing.in_turn(contenders.one_device(workload, REPLICAS, weights)),
        **{n: timing.in_turn(functools.partial(_first, s)) for n, s in built.items()},
    }
    measured = timing.measure(prepared, count, ROUNDS * cli.rounds(), WARM_UP)
    # Replicas normalize by their own examples, and sum the gradients of repeated rows
    # before Adam squares them.
    inexact = workload.batch_norm or workload.adam
    comparable = list(built) if inexact else list(measured)
    if not timing.agree(measured, comparable):
        losses = {name: measured[name].losses for name in comparable}
        cli.fail(f"{workload.title}: builders compute different losses, {losses}")
    measurements = {
        name: dataclasses.asdict(measurement) for name, measurement in measured.items()
    }
    for name, repl in replicators.items():
        measurements[name] |= planned(built[name]) | {"predicted": predicted(repl)}
    return measurements


def predicted(repl: replicator.Replicator) -> float:
    """Returns a strategy's predicted time for keeping all variables equal.

    Args:
        repl: A Replicator that has built a step.
    """
    return math.fsum(node.seconds or 0.0 for node in repl.strategy.nodes)


def _first(step: Callable[[], Any]) -> tf.Tensor:
    """Runs a step; returns replica 0's result."""
    return step()[0]


def planned(step: Any) -> dict[str, int]:
    """Returns a step's communication, according to its plan.

    Args:
        step: A step that has been called.

    Returns:
        The "nbytes" that are sent, where loops and conditionals count one turn, and the
        number of communications whose size is "unknown" before they run.
    """
    totals = step.plan.totals
    both = totals.per_step, totals.per_turn
    return {
        "nbytes": sum(total.nbytes for total in both),
        "unknown": sum(total.unknown for total in both),
    }


def from_json(found: Mapping[str, Any]) -> dict[str, timing.Measured]:
    """Returns the measurements of one network, by builder."""
    return {name: timing.Measured.from_json(fields) for name, fields in found.items()}


def fastest(measured: Mapping[str, timing.Measured]) -> str:
    """Returns the builder with the shortest steps."""
    names = [name for name in BUILDERS if name in measured]
    return min(names, key=lambda name: measured[name].median)


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the tables of step times and predictions, and that of bytes.

    Args:
        found: `found[setting][workload][builder]` is the result of `measure`.
    """
    result = []
    for setting, by_network in found.items():
        result += [_times(setting, by_network), _predictions(setting, by_network)]
    return [*result, *[_bytes(by_network) for by_network in found.values()][:1]]


def _times(setting: str, found: Mapping[str, Any]) -> Table:
    measured = [from_json(by_name) for by_name in found.values()]
    alone = [milliseconds(by_name[BASELINE].median) for by_name in measured]
    noise = [f"{by_name[BASELINE].spread:.1%}" for by_name in measured]
    names = _common(found)
    rows = [[name, *(_time(by_name, name) for by_name in measured)] for name in names]
    return Table(
        f"Median step under each strategy, oneDNN {setting}, in ms",
        ["", *_titles(found)],
        [[BASELINE, *alone], *rows, ["noise", *noise]],
        f"{REPLICAS} replicas. In brackets: of the fastest builder's time, as the "
        "median over rounds. Several builders come to the same strategy on some of the "
        "networks: Auto, Sharded, PS and PSLoadBalancing, say.",
    )


def _time(measured: Mapping[str, timing.Measured], name: str) -> str:
    ratio = timing.ratio(measured[name], measured[fastest(measured)])
    return f"{milliseconds(measured[name].median)} ({ratio:.2f})"


def _predictions(setting: str, found: Mapping[str, Any]) -> Table:
    rows = [
        [name, *(_prediction(by_name, name) for by_name in found.values())]
        for name in _common(found)
    ]
    return Table(
        f"Predicted for keeping variables equal, oneDNN {setting}, in ms",
        ["", *_titles(found)],
        rows,
        "What the strategy says of a step: gradients, updates and reads. In brackets: "
        "how much more than under the fastest builder, as predicted and as measured.",
    )


def _prediction(found: Mapping[str, Any], name: str) -> str:
    measured = from_json(found)
    least = fastest(measured)
    seconds = found[name]["predicted"]
    more = seconds - found[least]["predicted"]
    really = measured[name].median - measured[least].median
    return f"{_short(seconds)} ({_short(more, '+')}, {_short(really, '+')})"


def _short(seconds: float, sign: str = "") -> str:
    """Returns milliseconds with two significant digits."""
    value = seconds * 1e3
    return f"{value:{sign}.{0 if abs(value) >= 10 else 1 if abs(value) >= 1 else 3}f}"


def _bytes(found: Mapping[str, Any]) -> Table:
    rows = [
        [name, *(_sent(by_name[name]) for by_name in found.values())]
        for name in _common(found)
    ]
    return Table(
        "Bytes communicated in a step under each strategy",
        ["", *_titles(found)],
        rows,
        "As the plan says: what is reduced, gathered and broadcast, not what is read "
        "where it is. In loops, of one turn. With +, there are communications whose "
        "size is known only when they happen.",
    )


def _sent(one: Mapping[str, Any]) -> str:
    return size(one["nbytes"]) + ("+" if one["unknown"] else "")


def _titles(found: Mapping[str, Any]) -> list[str]:
    return [NETWORKS[network].title for network in found]


def _common(found: Mapping[str, Any]) -> list[str]:
    """Returns the builders that were measured on all networks, in order."""
    return [
        name
        for name in BUILDERS
        if all(name in by_builder for by_builder in found.values())
    ]


def main(argv: list[str]) -> None:
    """Measures what the flags ask for, prints the tables and writes the JSON file."""
    cli.refuse_arguments(argv)
    if cli.CELL.value is not None:
        contenders.split_cpu(REPLICAS)
        (name,) = cli.choose([cli.CELL.value], NETWORKS)
        count = cli.steps(STEPS[name])
        print(json.dumps(measure(NETWORKS[name], count)))
        return
    settings = cli.choose(steps.ONEDNN.value, steps.SETTINGS)
    about = results.facts()
    measurements = steps.apart(NAME, cli.chosen(NETWORKS), settings)
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
