# SPDX-License-Identifier: Apache-2.0
"""Prints what a step communicates: `python -m replicator.plan module:make`.

`make()` returns (repl, step_fn), (repl, step_fn, input_fn), or what `repl.build`
returned. The step is built but not run. With --simulate-hosts=N it is built for N hosts
like this one, in a tf.Graph, where variables have no values and Python cannot read
those of tensors. The module's own flags, defined with absl or argparse, go after `--`.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

import tensorflow as tf
from absl import app, flags

from replicator import command_line
from replicator.costs import paper
from replicator.plan import programs
from replicator.report import files
from replicator.report import plan as plans
from replicator.step.steps import Step

_USAGE = (
    "python -m replicator.plan module:make [--json=PATH] [--plot=PATH] "
    "[--simulate-hosts=N] [-- FLAGS OF THE MODULE]"
)
_MOST_HOSTS = 1024
# Apart from the flags of the module, which may have the same names.
PROGRAM_FLAGS = flags.FlagValues()
_JSON = flags.DEFINE_string(
    "json", None, "A file to write the plan to, as JSON.", flag_values=PROGRAM_FLAGS
)
_PLOT = flags.DEFINE_string(
    "plot", None, "A .png or .svg file to plot the plan to.", flag_values=PROGRAM_FLAGS
)
_HOSTS = flags.DEFINE_integer(
    "simulate-hosts",
    None,
    "Builds the step in a graph for this many hosts, each with the devices that the "
    "program names (none need to exist), and predicts how long it communicates.",
    1,
    _MOST_HOSTS,
    flag_values=PROGRAM_FLAGS,
)


@command_line.interruptible
def main(argv: Sequence[str]) -> int:
    """Prints the plan of the step that the arguments name; returns the exit status."""
    try:
        names, arguments = command_line.split(argv)
        if len(names) != 1:
            raise command_line.BadInput(f"usage: {_USAGE}")
        picture, text = _PLOT.value, _JSON.value
        if picture is not None:
            programs.attempt("--plot", lambda: files.check_picture("a plan", picture))
        command_line.check_outputs(_JSON, _PLOT)
        with _hosts(_HOSTS.value):
            plan = _plan(names[0], arguments)
        if _HOSTS.value not in (None, len(plan.hosts)):
            raise command_line.BadInput(
                f"{names[0]} names devices on {len(plan.hosts)} hosts of a cluster; "
                "--simulate-hosts needs the devices of one host, e.g. CPU:0"
            )
        programs.attempt("the table", plan.print)
        if text is not None:
            programs.attempt(
                "--json", lambda: pathlib.Path(text).write_text(plan.to_json())
            )
        if picture is not None:
            programs.attempt("--plot", lambda: plan.plot(picture))
    except command_line.BadInput as error:
        return command_line.fail(error)
    return 0


@contextlib.contextmanager
def _hosts(count: int | None) -> Iterator[None]:
    """In this block, `count` hosts are simulated, unless it is None."""
    if count is None:
        yield
    else:
        with tf.Graph().as_default(), paper.on_paper(count):
            yield


def _plan(name: str, arguments: Sequence[str]) -> plans.Plan:
    """Returns the plan of the step that `module:make` makes."""
    step = programs.load_step(name, arguments)
    return programs.attempt(f"the step of {name}", lambda: _built(step))


def _built(step: Step) -> plans.Plan:
    if not tf.executing_eagerly():
        step()  # builds into the default graph, which no session runs
    return step.plan


if __name__ == "__main__":
    app.run(main, flags_parser=lambda argv: command_line.parse(argv, PROGRAM_FLAGS))
