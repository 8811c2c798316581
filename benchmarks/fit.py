"""Epochs of Keras' fit: `python -m benchmarks.fit [--only=small,lstm]`.

Plain Keras on one device, in MirroredStrategy's scope, and on replicas by
`Replicator.keras_model`. A step of the measurement is an epoch of BATCHES batches, with
all that fit does around them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from absl import app

import replicator
from benchmarks import cli, contenders, timing, workloads
from benchmarks.contenders import BASELINE, OPTIONS, OURS, RIVAL, SHARDED
from benchmarks.tables import Table, milliseconds

NAME = "fit"
NAMES = (BASELINE, RIVAL, OURS, SHARDED)
REPLICAS = 2
WARM_UP = 2
BATCHES = {"small": 100, "large": 4, "resnet20": 4, "lstm": 4}  # per epoch


def epoch(name: str, workload: workloads.Workload, batches: int) -> timing.Step:
    """Returns what trains for an epoch and returns its loss.

    Args:
        name: The contender.
        workload: What is trained.
        batches: How many there are in an epoch.
    """
    x, y = workload.network.batch(workload.batch)
    x, y = (np.concatenate([leaf] * batches) for leaf in (x, y))
    model = _model(name, workload)
    fit = functools.partial(
        model.fit, x, y, batch_size=workload.batch, shuffle=False, verbose=0
    )
    return lambda: fit().history["loss"][0]


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


def measure(workload: workloads.Workload) -> dict[str, timing.Measured]:
    """Measures all contenders on one workload."""
    keras.backend.clear_session()
    batches = BATCHES[workload.name]
    steps: dict[str, Callable[[], Any]] = {
        name: epoch(name, workload, batches) for name in NAMES
    }
    prepared = {name: timing.in_turn(step) for name, step in steps.items()}
    measured = timing.measure(prepared, cli.steps(40), cli.rounds(), WARM_UP)
    compared = [name for name in NAMES if not workload.batch_norm or name != BASELINE]
    if not timing.agree(measured, compared):
        losses = {name: one.losses for name, one in measured.items()}
        cli.fail(f"{workload.title}: contenders compute different losses, {losses}")
    return measured


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of epochs.

    Args:
        found: `found[workload][contender]` is a Measured as a dict.
    """
    rows = []
    for network, by_name in found.items():
        measured = {
            name: timing.Measured.from_json(one) for name, one in by_name.items()
        }
        best = min((OURS, SHARDED), key=lambda name: measured[name].median)
        rows.append(
            [
                network,
                *(milliseconds(measured[name].median) for name in NAMES),
                f"{timing.ratio(measured[best], measured[BASELINE]):.2f}",
                f"{timing.ratio(measured[best], measured[RIVAL]):.2f}",
                f"{measured[BASELINE].spread:.1%}",
            ]
        )
    return [
        Table(
            "Median epoch of fit, in ms",
            ["network", *NAMES, "/ one device", "/ MirroredStrategy", "noise"],
            rows,
            f"{REPLICAS} replicas; the ratios are of the faster of ours. An epoch has "
            + ", ".join(f"{n} batches ({name})" for name, n in BATCHES.items())
            + ".",
        )
    ]


def main(argv: list[str]) -> None:
    """Measures all, prints the table and writes the JSON file."""
    cli.refuse_arguments(argv)
    contenders.split_cpu(REPLICAS)
    known = [one for one in workloads.WORKLOADS if one.name in BATCHES]
    cli.one_by_one(NAME, known, measure, tables)


if __name__ == "__main__":
    app.run(main)
