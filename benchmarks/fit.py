# SPDX-License-Identifier: Apache-2.0
"""Epochs of Keras' fit: `python -m benchmarks.fit [--only=small,lstm]`.

Plain Keras on one device, in MirroredStrategy's scope, and on replicas by
`Replicator.keras_model`. A step of the measurement is an epoch, with all that fit does
around its batches. The dataset tunes nothing while it runs: with autotuning, the end of
an epoch now and then waits for the thread that tunes, whose periods double from 10 ms
on, so that epochs of one contender took 2.8 or 5.1 or 10.2 s by chance.
MirroredStrategy tunes all the same, so everybody's fastest epochs are compared.

Each contender is in a process of its own. Where fit under MirroredStrategy has run in a
process, all that allocates memory there afterwards takes it from the system anew: a
hundred thousand page faults in a batch of ResNet-20, which took one device 0.4 s in
place of 0.2 and Replicator 0.44 in place of 0.16.
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
EPOCHS = 10  # of each, by default: one per round
WARM_UP = 2
BATCHES = {"small": 1000, "large": 30, "resnet20": 15, "lstm": 10}  # per epoch


def epoch(name: str, workload: workloads.Workload, batches: int) -> timing.Step:
    """Returns what trains for an epoch and returns its loss.

    Args:
        name: The contender.
        workload: What is trained.
        batches: How many there are in an epoch.
    """
    x, y = workload.network.batch(workload.batch)
    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat(batches).with_options(options)
    model = _model(name, workload)
    return lambda: model.fit(dataset, verbose=0).history["loss"][0]


def _model(name: str, workload: workloads.Workload) -> keras.Model:
    """Returns a contender's model, compiled, with the same weights as any other's."""

    def make() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = workload.make_model()
        # Not the workload's: at its rate the losses of many epochs stay finite.
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-4, momentum=workload.momentum), loss)
        return model

    if name == BASELINE:
        return make()
    if name == RIVAL:
        with contenders.strategy_of(REPLICAS).scope():
            return make()
    repl = replicator.Replicator(contenders.devices(REPLICAS), **OPTIONS[name])
    with repl.context():
        model = make()
    return repl.keras_model(model)


def measure(workload: workloads.Workload, setting: str) -> dict[str, timing.Measured]:
    """Measures all contenders on one workload, with a setting of oneDNN."""
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
        losses = {name: one.losses for name, one in measured.items()}
        cli.fail(f"{workload.title}: contenders compute different losses, {losses}")
    return measured


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the tables of epochs, for each setting of oneDNN.

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
    ours = measured[OURS].fastest
    ratios = (ours / measured[other].fastest for other in (BASELINE, RIVAL))
    return [
        steps.NAMES[name].title,
        str(BATCHES[name]),
        *(milliseconds(measured[contender].fastest) for contender in NAMES),
        *(f"{ratio:.2f}" for ratio in ratios),
        f"{measured[BASELINE].spread:.1%}",
    ]


def answer(workload: workloads.Workload) -> None:
    """Trains for epochs when it is told to, in a process of a contender."""
    tf.get_logger().setLevel("ERROR")  # MirroredStrategy tells of each all-reduce
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
    chosen = cli.chosen(BATCHES)
    about = results.facts()
    found: dict[str, dict[str, Any]] = {}
    for setting in settings:
        found[setting] = {}
        for name in chosen:
            workload = steps.NAMES[name]
            cli.progress(f"fit: measuring {workload.title} with oneDNN {setting} ...")
            measured = measure(workload, setting)
            asdict = dataclasses.asdict
            found[setting][name] = {n: asdict(one) for n, one in measured.items()}
    cli.finish(NAME, about, found, tables(found))


if __name__ == "__main__":
    app.run(main)
