# SPDX-License-Identifier: Apache-2.0
"""The cost of communication in a loop: `python -m benchmarks.loops`.

Compares an all-reduce in a loop of 100 turns with the same 100 all-reduces unrolled:
the time of a turn, and its ratio to the time of one unrolled all-reduce, over sizes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import app

import replicator
from benchmarks import cli, contenders, results, timing
from benchmarks.tables import Table

NAME = "loops"
TURNS = 100
SIZES = (1, 1_000, 10_000, 100_000)  # float32 numbers
STEPS = LOOP, UNROLLED = "loop", "unrolled"


def steps(size: int) -> dict[str, timing.Run]:
    """Returns a looped and an unrolled step of TURNS all-reduces each."""
    repl = replicator.Replicator(contenders.DEVICES)

    def turn(x: tf.Tensor) -> tf.Tensor:
        return repl.all_reduce(x, "mean") * 0.99 + 0.01

    def start() -> tf.Tensor:
        return tf.random.uniform([size])

    def looped() -> tf.Tensor:
        x = tf.while_loop(
            lambda n, x: n < TURNS,
            lambda n, x: (n + 1, turn(x)),
            [tf.constant(0), start()],
        )[1]
        return tf.reduce_mean(x)

    def unrolled() -> tf.Tensor:
        x = start()
        for _ in range(TURNS):
            x = turn(x)
        return tf.reduce_mean(x)

    steps_by_name = {LOOP: repl.build(looped), UNROLLED: repl.build(unrolled)}
    return {
        name: timing.in_turn(functools.partial(_first, step))
        for name, step in steps_by_name.items()
    }


def _first(step: Callable[[], Any]) -> tf.Tensor:
    """Runs a step; returns replica 0's result."""
    return step()[0]


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of times per all-reduce, in microseconds, and their ratio.

    Args:
        found: `found[numbers][LOOP or UNROLLED]` is a Measured as a dict.
    """
    rows = []
    for size, by_name in found.items():
        loop, unrolled = (timing.Measured.from_json(by_name[n]) for n in STEPS)
        rows.append(
            [
                f"{int(size):,}",
                f"{loop.median / TURNS * 1e6:.1f}",
                f"{unrolled.median / TURNS * 1e6:.1f}",
                f"{timing.ratio(loop, unrolled):.2f}",
                f"{unrolled.spread:.1%}",
            ]
        )
    return [
        Table(
            "An all-reduce in a loop, in us",
            ["float32 numbers", *STEPS, " / ".join(STEPS), "noise"],
            rows,
            f"{TURNS} turns in a tf.while_loop, beside as many all-reduces without it.",
        )
    ]


def main(argv: list[str]) -> None:
    """Measures all sizes, prints the table and writes the JSON file."""
    cli.refuse_arguments(argv)
    sizes = cli.chosen(map(str, SIZES))
    contenders.split_cpu()
    about = results.facts()
    measurements = {}
    for size in sizes:
        cli.progress(f"loops: measuring {size} numbers ...")
        measured = timing.measure(
            steps(int(size)), cli.steps(60), cli.rounds(), warm_up=5
        )
        measurements[size] = {
            name: dataclasses.asdict(measurement)
            for name, measurement in measured.items()
        }
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
