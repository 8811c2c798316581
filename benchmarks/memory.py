# SPDX-License-Identifier: Apache-2.0
"""The memory of variables and optimizer slots: `python -m benchmarks.memory`.

Trains a perceptron with Adam. "Counted" is the bytes of all components of all
variables. "Resident" is the growth of the process from before the variables exist to
after some steps; memory that a step needs only while it runs is returned by then, since
the C library maps blocks of this size one by one. Each contender runs in its own
process.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import app, flags

import replicator
from benchmarks import cli, contenders, networks, results, workloads
from benchmarks.contenders import BASELINE, MIRRORED, OPTIONS, OURS, RIVAL
from benchmarks.tables import Table, size

_UNITS = flags.DEFINE_integer(
    "units", 3072, "Width of the hidden layers; a quick run has 512.", lower_bound=1
)

NAME = "memory"
NAMES = (BASELINE, RIVAL, OURS, MIRRORED)
REPLICAS = 2
STEPS = 3
BATCH = 16


def resident() -> dict[str, int]:
    """Returns this process's resident memory and its peak, in bytes."""
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    lines = dict(line.split(":", 1) for line in status)
    return {
        name: int(lines[key].split()[0]) * 1024
        for name, key in (("resident", "VmRSS"), ("peak", "VmHWM"))
    }


def counted(variables: Iterable[Any]) -> int:
    """Returns the bytes of all components of variables, each counted once."""
    components = {}
    for variable in variables:
        value = variable.value if isinstance(variable, keras.Variable) else variable
        # A ReplicatedVariable, a MirroredVariable, or a plain variable.
        parts = getattr(value, "components", getattr(value, "values", (value,)))
        for part in parts:
            components[id(part)] = part.shape.num_elements() * part.dtype.size
    return sum(components.values())


def train(name: str, network: networks.Perceptron) -> list[Any]:
    """Trains a perceptron for some steps; returns all variables.

    Args:
        name: The contender.
        network: The network to train.
    """
    workload = workloads.Workload("", "", network, workloads.mlp, BATCH, STEPS)
    if name == BASELINE:
        with tf.device(contenders.DEVICES[0]):
            model, optimizer = _make(workload)
        batch = workload.parts(1)[0]
        step = tf.function(lambda: workloads.train_step(model, optimizer, batch))
    elif name == RIVAL:
        strategy = contenders.strategy_of(REPLICAS)
        with strategy.scope():
            model, optimizer = _make(workload)
        part = workload.parts(REPLICAS)[0]
        step = tf.function(
            lambda: strategy.run(lambda: workloads.train_step(model, optimizer, part))
        )
    else:
        repl = replicator.Replicator(contenders.devices(REPLICAS), **OPTIONS[name])
        with repl.context():
            model, optimizer = _make(workload)
            optimizer = repl.wrap_optimizer(optimizer)
        part = workload.parts(REPLICAS)[0]
        step = repl.build(lambda: workloads.train_step(model, optimizer, part))
    for _ in range(STEPS):
        step()
    return [*model.variables, *optimizer.variables]


def _make(
    workload: workloads.Workload,
) -> tuple[tf.keras.Model, tf.keras.optimizers.Optimizer]:
    model = workload.make_model()
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    return model, optimizer


def measure(name: str, units: int) -> dict[str, int]:
    """Measures one contender in this process, which must not hold variables yet."""
    train(name, networks.Perceptron(8, 8, 1))  # allocates what TensorFlow itself keeps
    before = resident()["resident"]
    variables = train(name, networks.Perceptron(units, units, 3))
    after = resident()
    return {
        "counted": counted(variables),
        "resident": after["resident"] - before,
        "peak": after["peak"] - before,
    }


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of each contender's memory.

    Args:
        found: `found[contender]` has "counted", "resident" and "peak", in bytes.
    """
    kinds = ("counted", "resident", "peak")
    rows = []
    for name, by_kind in found.items():
        of = [by_kind[kind] / found[MIRRORED][kind] for kind in kinds]
        cells = [f"{size(by_kind[kind])}" for kind in kinds]
        rows.append([name, *cells, *(f"{share:.2f}" for share in of)])
    return [
        Table(
            f"Variables and Adam's slots, {REPLICAS} replicas",
            ["", *kinds, *(f"{kind} / mirrored" for kind in kinds)],
            rows,
            "Resident: how much more than before the variables were made, between "
            "steps. Peak: the most in all of it, with what a step needs in between.",
        )
    ]


def main(argv: list[str]) -> None:
    """Measures all contenders, prints the table and writes the JSON file."""
    cli.refuse_arguments(argv)
    units = min(_UNITS.value, 512) if cli.QUICK.value else _UNITS.value
    if cli.CELL.value is not None:
        tf.get_logger().setLevel("ERROR")
        contenders.split_cpu(REPLICAS)
        print(json.dumps(measure(cli.CELL.value, units)))
        return
    names = [name for name in NAMES if name in (BASELINE, RIVAL) or name in OPTIONS]
    about = results.facts()
    measurements = {}
    for name in names:
        cli.progress(f"memory: measuring {name} ...")
        flag = f"--cell={name}"
        measurements[name] = cli.apart("benchmarks.memory", flag, f"--units={units}")
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
