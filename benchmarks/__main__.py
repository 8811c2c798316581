"""Runs the benchmarks: `python -m benchmarks [--only=small,deep] [--steps=100]`."""

from __future__ import annotations

import pathlib

import rich.console
import tensorflow as tf
from absl import app, flags

from benchmarks import contenders, report, timing, workloads

_ONLY = flags.DEFINE_list(
    "only", [w.name for w in workloads.WORKLOADS], "The workloads to run."
)
_STEPS = flags.DEFINE_integer(
    "steps",
    None,
    "Timed steps per contender; by default enough for each.",
    lower_bound=1,
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 20, "How often the contenders take turns.", lower_bound=1
)
_WARM_UP = flags.DEFINE_integer("warm_up", 5, "Steps before timing.", lower_bound=1)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir",
    str(pathlib.Path(__file__).parent / "results"),
    "Where the JSON file with all results goes.",
)


def run(
    workload: workloads.Workload, steps: int | None, rounds: int, warm_up: int
) -> dict[str, timing.Measured]:
    """Measures all contenders on one workload.

    Args:
        workload: What is trained.
        steps: Timed steps per contender; None: as many as the workload says.
        rounds: How often the contenders take turns.
        warm_up: Steps before timing.
    """
    weights = contenders.initial_weights(workload)
    prepared = {
        name: make(workload, weights) for name, make in contenders.CONTENDERS.items()
    }
    return timing.measure(prepared, steps or workload.steps, rounds, warm_up)


def main(argv: list[str]) -> None:
    """Runs what the flags ask for, prints the tables and writes the JSON file."""
    chosen = {w.name: w for w in workloads.WORKLOADS if w.name in _ONLY.value}
    unknown = set(_ONLY.value) - set(chosen)
    if len(argv) > 1 or unknown:
        names = ", ".join(w.name for w in workloads.WORKLOADS)
        raise app.UsageError(
            f"unknown: {', '.join([*argv[1:], *unknown])}; have {names}"
        )
    tf.get_logger().setLevel("ERROR")  # MirroredStrategy tells of each all-reduce
    contenders.split_cpu()
    # Wide enough for the tables in a log file too, where the width is not known.
    console = rich.console.Console(width=max(120, rich.console.Console().width))
    results = {}
    for name, workload in chosen.items():
        console.print(f"measuring {name} ...")
        results[name] = run(workload, _STEPS.value, _ROUNDS.value, _WARM_UP.value)
    console.print(report.step_table(results))
    console.print(report.build_table(results))
    path = report.write(results, pathlib.Path(_OUTPUT_DIR.value))
    console.print(f"written to {path}")


if __name__ == "__main__":
    app.run(main)
