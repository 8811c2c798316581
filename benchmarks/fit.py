# SPDX-License-Identifier: Apache-2.0
"""Epochs of Keras' fit: `python -m benchmarks.fit [--only=small,lstm]`.

Compares plain Keras on one device, MirroredStrategy's scope, and replicas by
`Replicator.keras_model`. A step of the measurement is one epoch, with everything that
fit does around its batches. The dataset does not autotune: with autotuning, the end of
an epoch sometimes waits for the tuning thread, whose periods double from 10 ms on, so
that epochs of one contender took 2.8 or 5.1 or 10.2 s by chance. MirroredStrategy
autotunes all the same, so the comparison uses every contender's fastest epoch.

Each contender runs in its own process. After fit has run under MirroredStrategy, all
later allocations of the process come from the system anew: a hundred thousand page
faults in a batch of ResNet-20, which then took one device 0.4 s instead of 0.2 and
Replicator 0.44 instead of 0.16.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import app

import replicator
from benchmarks import cli, contenders, results, steps, timing, workloads
from benchmarks.contenders import BASELINE, OPTIONS, OURS, RIVAL
from benchmarks.on_hosts import namespaces, turns
from benchmarks.tables import Table, milliseconds

NAME = "fit"
NAMES = (BASELINE, RIVAL, OURS)
REPLICAS = 2
EPOCHS = 10  # of each contender, by default: one per round
WARM_UP = 2
BATCHES = {"small": 1000, "large": 30, "resnet20": 15, "lstm": 10}  # per epoch


def epoch(name: str, workload: workloads.Workload, batches: int) -> timing.Step:
    """Returns a function that trains for an epoch and returns its loss.

    Args:
        name: The contender.
        workload: The workload to train.
        batches: The number of batches in an epoch.
    """
    dataset, model = batches_of(workload, batches), _model(name, workload)
    return lambda: model.fit(dataset, verbose=0).history["loss"][0]


def batches_of(workload: workloads.Workload, count: int) -> tf.data.Dataset:
    """Returns a dataset of so many batches of a workload."""
    options = tf.data.Options()
    options.autotune.enabled = False
    batch = tf.data.Dataset.from_tensors(workload.network.batch(workload.batch))
    return batch.repeat(count).with_options(options)


def compiled_model(workload: workloads.Workload) -> keras.Model:
    """Returns a new compiled model, with the same weights as every other."""
    keras.utils.set_random_seed(0)
    model = workload.make_model()
    # Not the workload's rate: with this one the losses stay finite for many epochs.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-4, momentum=workload.momentum), loss)
    return model


def _model(name: str, workload: workloads.Workload) -> keras.Model:
    """Returns a contender's model."""
    if name == BASELINE:
        return compiled_model(workload)
    if name == RIVAL:
        with contenders.strategy_of(REPLICAS).scope():
            return compiled_model(workload)
    repl = replicator.Replicator(contenders.devices(REPLICAS), **OPTIONS[name])
    with repl.context():
        model = compiled_model(workload)
    return repl.keras_model(model)


def measure(workload: workloads.Workload, setting: str) -> dict[str, timing.Measured]:
    """Measures all contenders on one workload, with one oneDNN setting."""
    command = [sys.executable, "-m", "benchmarks.fit", f"--cell={workload.name}"]
    command += cli.handed_on(cli.QUICK)
    environment = {"TF_ENABLE_ONEDNN_OPTS": steps.SETTINGS[setting]}
    with contextlib.ExitStack() as stack:
        prepared = {}
        for name in NAMES:
            program = turns.running(
                name, namespaces.LOOPBACK[:1], [command], environment
            )
            prepared[name] = stack.enter_context(program).run(name)
        measured = timing.measure(
            prepared, cli.steps(EPOCHS), cli.rounds(), WARM_UP, settle=0
        )
    compared = [name for name in NAMES if not workload.batch_norm or name != BASELINE]
    if not timing.agree(measured, compared):
        losses = {name: measurement.losses for name, measurement in measured.items()}
        cli.fail(f"{workload.title}: contenders compute different losses, {losses}")
    return measured


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns a table of epochs for each oneDNN setting.

    Args:
        found: `found[setting][workload][contender]` is a Measured as a dict.
    """
    return [
        Table(
            f"Fastest epoch of fit with oneDNN {setting}, in ms",
            [
                *("", "batches", *NAMES),
                *(f"{OURS} / {other}" for other in (BASELINE, RIVAL)),
                "noise",
            ],
            [_row(name, steps.from_json(one)) for name, one in by_name.items()],
            f"{REPLICAS} replicas. Noise: how far apart the middle half of epochs on "
            "one device lies.",
        )
        for setting, by_name in found.items()
    ]


def _row(name: str, measured: Mapping[str, timing.Measured]) -> list[str]:
    fastest = measured[OURS].fastest
    ratios = (fastest / measured[other].fastest for other in (BASELINE, RIVAL))
    return [
        steps.NAMES[name].title,
        str(BATCHES[name]),
        *(milliseconds(measured[contender].fastest) for contender in NAMES),
        *(f"{ratio:.2f}" for ratio in ratios),
        f"{measured[BASELINE].spread:.1%}",
    ]


def answer(workload: workloads.Workload) -> None:
    """Trains for epochs on request, in a contender's process."""
    tf.get_logger().setLevel("ERROR")  # MirroredStrategy logs each all-reduce
    contenders.split_cpu(REPLICAS)
    batches = 4 if cli.QUICK.value else BATCHES[workload.name]
    turns.answer({name: _in_turn(name, workload, batches) for name in NAMES})


def _in_turn(
    name: str, workload: workloads.Workload, batches: int
) -> Callable[[], timing.Run]:
    return lambda: timing.in_turn(epoch(name, workload, batches))


def main(argv: list[str]) -> None:
    """Measures what the flags ask for, prints the tables and writes the JSON file."""
    cli.refuse_arguments(argv)
    if cli.CELL.value is not None:
        (name,) = cli.choose([cli.CELL.value], BATCHES)
        answer(steps.NAMES[name])
        return
    settings = cli.choose(steps.ONEDNN.value, steps.SETTINGS)
    names = cli.chosen(BATCHES)
    about = results.facts()
    measurements: dict[str, dict[str, Any]] = {}
    for setting in settings:
        measurements[setting] = {}
        for name in names:
            workload = steps.NAMES[name]
            cli.progress(f"fit: measuring {workload.title} with oneDNN {setting} ...")
            measured = measure(workload, setting)
            asdict = dataclasses.asdict
            measurements[setting][name] = {
                n: asdict(measurement) for n, measurement in measured.items()
            }
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
