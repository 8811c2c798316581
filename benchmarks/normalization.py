# SPDX-License-Identifier: Apache-2.0
"""What statistics of the whole batch cost: `python -m benchmarks.normalization`.

Compares epochs of Keras' fit of ResNet-20 that normalizes by the whole batch, which
sends sums of each layer, with epochs of replicas that normalize by their own rows. Both
take turns in one process. Wall times suffer from other programs; the processor time of
the process suffers less, but does not show what replicas wait for.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import app

import replicator
from benchmarks import cli, contenders, fit, results, steps, workloads
from benchmarks.tables import Table, milliseconds

NAME = "normalization"
WHOLE, LOCAL = "whole batch", "local statistics"
NAMES = (WHOLE, LOCAL)
WALL, PROCESSOR = "wall", "processor"
REPLICAS = 2
SIZES = (128, 32)  # examples per step
EXAMPLES = 384  # per epoch
ROUNDS = 20

Seconds = Mapping[str, Mapping[str, list[float]]]


def epochs(workload: workloads.Workload, batches: int) -> dict[str, Callable[[], Any]]:
    """Returns functions that train for an epoch, by the statistics that they use."""
    dataset = fit.batches_of(workload, batches)
    found: dict[str, Callable[[], Any]] = {}
    for name in NAMES:
        repl = replicator.Replicator(contenders.devices(REPLICAS))
        with repl.context():
            model = fit.compiled_model(workload)
        model = repl.keras_model(model, local_statistics=name == LOCAL)
        found[name] = functools.partial(model.fit, dataset, verbose=0)
    return found


def measure(size: int, examples: int, rounds: int) -> Seconds:
    """Measures epochs of both, in turns.

    Args:
        size: The number of examples of a step.
        examples: The number of examples of an epoch.
        rounds: The number of epochs of each.

    Returns:
        Seconds per step, by statistics, clock and round.
    """
    workload = dataclasses.replace(steps.NAMES["resnet20"], batch=size)
    batches = max(examples // size, 1)
    train = epochs(workload, batches)
    found: dict[str, dict[str, list[float]]] = {
        n: {WALL: [], PROCESSOR: []} for n in train
    }
    for epoch in train.values():
        epoch()  # builds
    for turn in range(rounds):
        for name in NAMES[:: (-1) ** turn]:
            wall, processor = time.perf_counter(), time.process_time()
            train[name]()
            found[name][WALL].append((time.perf_counter() - wall) / batches)
            found[name][PROCESSOR].append((time.process_time() - processor) / batches)
    return found


def ratio(seconds: Seconds, clock: str) -> float:
    """Returns the median, over rounds, of the whole batch's time by local's."""
    pairs = zip(seconds[WHOLE][clock], seconds[LOCAL][clock], strict=True)
    return statistics.median(whole / local for whole, local in pairs)


def tables(found: Mapping[str, Mapping[str, Seconds]]) -> list[Table]:
    """Returns the table of steps.

    Args:
        found: `found[setting][batch size]` is what `measure` returns.
    """
    rows = []
    for setting, by_size in found.items():
        for size, one in by_size.items():
            cells = [f"{size} examples, oneDNN {setting}"]
            for clock in (WALL, PROCESSOR):
                medians = (statistics.median(one[n][clock]) for n in NAMES)
                cells += [*map(milliseconds, medians), f"{ratio(one, clock):.2f}"]
            rows.append(cells)
    return [
        Table(
            "A step of fit, Keras ResNet-20, by batch normalization, in ms",
            [
                *("", f"{WALL}: {WHOLE}", LOCAL, "ratio"),
                *(f"{PROCESSOR}: {WHOLE}", LOCAL, "ratio"),
            ],
            rows,
            f"{REPLICAS} replicas. Medians of epochs in turns; ratios are medians over "
            "rounds. Processor: of all threads of the process. Under load, see below, "
            "wall times are those of other programs, too.",
        )
    ]


def main(argv: list[str]) -> None:
    """Measures, prints the table and writes the JSON file."""
    cli.refuse_arguments(argv)
    quick = cli.QUICK.value
    if cli.CELL.value is not None:
        tf.get_logger().setLevel("ERROR")
        contenders.split_cpu(REPLICAS)
        rounds = cli.ROUNDS.value or (2 if quick else ROUNDS)
        examples = 8 if quick else EXAMPLES
        print(json.dumps(measure(int(cli.CELL.value), examples, rounds)))
        return
    settings = cli.choose(steps.ONEDNN.value, steps.SETTINGS)
    sizes = ("4",) if quick else cli.chosen(map(str, SIZES))
    about = results.facts()
    measurements: dict[str, dict[str, Any]] = {}
    for setting in settings:
        environment = {"TF_ENABLE_ONEDNN_OPTS": steps.SETTINGS[setting]}
        measurements[setting] = {}
        for size in sizes:
            cli.progress(f"{NAME}: {size} examples with oneDNN {setting} ...")
            flags = (f"--cell={size}", *cli.handed_on(cli.QUICK, cli.ROUNDS))
            measurements[setting][size] = cli.apart(
                f"benchmarks.{NAME}", *flags, environment=environment
            )
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
