"""What merging costs: `python -m benchmarks.loops`.

An all-reduce in a loop of 100 turns, beside the same 100 all-reduces without a loop:
the time of a turn, and its ratio to the time of one unrolled all-reduce, over sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import rich.console
import rich.table
import tensorflow as tf
from absl import app, flags

import replicator
from benchmarks import contenders, timing

_STEPS = flags.DEFINE_integer("steps", 60, "Timed steps of each.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 20, "How often they take turns.", lower_bound=1
)

TURNS = 100
SIZES = (1, 1_000, 10_000, 100_000)  # float32 numbers
LOOP, UNROLLED = "loop", "unrolled"

Step = Callable[[], tf.Tensor]


def steps(size: int) -> dict[str, Step]:
    """Returns both ways to all-reduce TURNS times, ready to be called."""
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

    built = {LOOP: repl.build(looped), UNROLLED: repl.build(unrolled)}
    return {name: functools.partial(_first, step) for name, step in built.items()}


def _first(step: Callable[[], Any]) -> tf.Tensor:
    """Runs a step; returns what replica 0 returns."""
    return step()[0]


def table(measured: dict[int, dict[str, timing.Measured]]) -> rich.table.Table:
    """Returns the table of times per all-reduce, in microseconds, and their ratio."""
    shown = rich.table.Table(
        title="One all-reduce of two replicas, in us",
        caption="Ratios are medians over rounds. Noise: how far the middle half of the "
        "unrolled rounds lies apart.",
    )
    for name in ("numbers", LOOP, UNROLLED, f"{LOOP} / {UNROLLED}", "noise"):
        shown.add_column(name, justify="right")
    for size, by_name in measured.items():
        loop, unrolled = by_name[LOOP], by_name[UNROLLED]
        shown.add_row(
            f"{size:,}",
            f"{loop.median / TURNS * 1e6:.1f}",
            f"{unrolled.median / TURNS * 1e6:.1f}",
            f"{timing.ratio(loop, unrolled):.2f}",
            f"{unrolled.spread:.1%}",
        )
    return shown


def main(argv: list[str]) -> None:
    """Measures all sizes and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown: {', '.join(argv[1:])}")
    contenders.split_cpu()
    measured = {
        size: timing.measure(steps(size), _STEPS.value, _ROUNDS.value, warm_up=5)
        for size in SIZES
    }
    rich.console.Console(width=100).print(table(measured))


if __name__ == "__main__":
    app.run(main)
