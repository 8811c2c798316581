# SPDX-License-Identifier: Apache-2.0
"""Where primitives work: `python -m benchmarks.anywhere`.

Runs every primitive at every place of the graph on two replicas, with Replicator and
with MirroredStrategy of the installed TensorFlow, compares values and gradients with
plain TensorFlow, and prints a table. --update=docs/guides/control_flow.md rewrites the
table in that file. MirroredStrategy runs each cell in its own process, since it may
hang.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import rich.console
import rich.progress
import rich.table
import tensorflow as tf
from absl import app, flags

import replicator
from benchmarks import cli, contenders
from benchmarks.places import PLACES, Call, Place
from benchmarks.programs import PROGRAMS, Program

_UPDATE = flags.DEFINE_string("update", None, "A Markdown file whose table to replace.")
_SECONDS = flags.DEFINE_integer(
    "seconds", 60, "Seconds after which a cell counts as hanging.", lower_bound=1
)

BEGIN, END = "<!-- anywhere: begin -->", "<!-- anywhere: end -->"
WORKS, ABSENT, HANGS, WRONG = "works", "none", "hangs", "wrong result"
REFUSED = "refused"


def inputs() -> list[np.ndarray]:
    """Returns the operands of the two replicas, [2, 2] each."""
    return [np.array([[1.0, 2.0], [3.0, 4.0]]) * (r + 1) for r in range(2)]


def expected(program: Program, place: Place) -> list[np.ndarray]:
    """Returns each replica's expected result, from plain TensorFlow on one device."""
    return [
        result.numpy()
        for result in place.plain(program.plain, map(tf.constant, inputs()))
    ]


def judge(results: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> str:
    """Returns whether results are right, as a cell's text."""
    equal = all(
        np.shape(result) == np.shape(reference) and np.allclose(result, reference)
        for result, reference in zip(results, wanted, strict=True)
    )
    return WORKS if equal else WRONG


def try_replicator(program: Program, place: Place) -> str:
    """Runs a cell with Replicator; returns the cell's text."""
    repl = replicator.Replicator(contenders.DEVICES)

    def step() -> tf.Tensor:
        x = tf.constant(np.stack(inputs()))[repl.replica_id]

        def call(x: tf.Tensor) -> tf.Tensor | None:
            return program.ours(repl, x)

        return place.run(call, x, repl.linked)

    try:
        results = repl.run(step)
    except Exception as error:  # any error goes into the table
        return f"{REFUSED} ({type(error).__name__})"
    return judge([t.numpy() for t in results], expected(program, place))


def try_mirrored(program: Program, place: Place) -> str:
    """Runs a cell with MirroredStrategy, in this process."""
    if program.mirrored is None:
        return ABSENT
    strategy = tf.distribute.MirroredStrategy(contenders.DEVICES)
    mirrored: Call = program.mirrored
    operands = tf.constant(np.stack(inputs()))

    @tf.function
    def run() -> tf.Tensor:
        def step() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            x = operands[context.replica_id_in_sync_group]
            return place.run(mirrored, x, lambda loss: loss)

        return strategy.run(step)

    try:
        results = strategy.experimental_local_results(run())
    except Exception as error:  # any error goes into the table
        return f"{REFUSED} ({type(error).__name__})"
    return judge([t.numpy() for t in results], expected(program, place))


def try_mirrored_apart(name: str, place: str, seconds: int) -> str:
    """Runs a cell with MirroredStrategy in a process of its own."""
    if PROGRAMS[name].mirrored is None:
        return ABSENT
    command = [sys.executable, "-m", "benchmarks.anywhere", f"--cell={name}/{place}"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return HANGS
    if process.returncode:
        return f"{REFUSED} (exit status {process.returncode})"
    return json.loads(process.stdout.splitlines()[-1])


Cells = dict[str, dict[str, tuple[str, str]]]  # [primitive][place] = (ours, theirs)


def try_all(names: Sequence[str], seconds: int, console: rich.console.Console) -> Cells:
    """Runs all cells of the named primitives."""
    cells: Cells = {}
    for name in rich.progress.track(names, "primitives", console=console):
        cells[name] = {
            place: (
                try_replicator(PROGRAMS[name], PLACES[place]),
                try_mirrored_apart(name, place, seconds),
            )
            for place in PLACES
        }
    return cells


def table(cells: Cells) -> rich.table.Table:
    """Returns the table for the terminal."""
    rich_table = rich.table.Table(
        title="Replicator · MirroredStrategy", caption=f"TensorFlow {tf.__version__}"
    )
    rich_table.add_column("primitive")
    for place in PLACES:
        rich_table.add_column(place)
    for name, row in cells.items():
        rich_table.add_row(name, *(" · ".join(cell) for cell in row.values()))
    return rich_table


def markdown(cells: Cells) -> str:
    """Returns the table for a Markdown file."""
    lines = [
        f"| Replicator · MirroredStrategy ({tf.__version__}) | " + " | ".join(PLACES),
        "|---" * (len(PLACES) + 1),
    ]
    lines += [
        f"| {name} | " + " | ".join(" · ".join(cell) for cell in row.values())
        for name, row in cells.items()
    ]
    return "\n".join(f"{line} |" for line in lines)


def update(path: pathlib.Path, text: str) -> None:
    """Replaces the text between the two markers of a file.

    Raises:
        SystemExit: The file does not exist or lacks the markers.
    """
    try:
        before, _, rest = path.read_text().partition(BEGIN)
    except OSError as error:
        cli.fail(f"--update={path}: {error.strerror}")
    _, found, after = rest.partition(END)
    if not found:
        cli.fail(f"--update={path}: no lines {BEGIN} and {END} in it")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main(argv: list[str]) -> None:
    """Runs all cells, prints the table and updates the file that --update names."""
    cli.refuse_arguments(argv)
    names = cli.chosen(PROGRAMS)
    tf.get_logger().setLevel("ERROR")
    contenders.split_cpu()
    if cli.CELL.value is not None:
        name, _, place = cli.CELL.value.partition("/")
        print(json.dumps(try_mirrored(PROGRAMS[name], PLACES[place])))
        return
    console = rich.console.Console(width=max(160, rich.console.Console().width))
    cells = try_all(names, _SECONDS.value, console)
    console.print(table(cells))
    if _UPDATE.value is not None:
        update(pathlib.Path(_UPDATE.value), markdown(cells))


if __name__ == "__main__":
    app.run(main)
