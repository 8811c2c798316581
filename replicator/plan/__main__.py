"""Prints what a step communicates: `python -m replicator.plan module:make`.

`make()` returns (repl, step_fn) or (repl, step_fn, input_fn). The step is built, and
not run. With --simulate-hosts=N it is built for N hosts like this one, in a tf.Graph,
where variables have no values and Python cannot see those of tensors.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import app, flags

from replicator import errors
from replicator.costs import paper
from replicator.plan import files
from replicator.plan import plan as plans
from replicator.replicator import Replicator

_USAGE = (
    "python -m replicator.plan module:make [--json=PATH] [--plot=PATH] "
    "[--simulate-hosts=N]"
)
_MOST_HOSTS = 1024
_JSON = flags.DEFINE_string("json", None, "A file to write the plan to, as JSON.")
_PLOT = flags.DEFINE_string("plot", None, "A .png or .svg file to plot the plan to.")
_HOSTS = flags.DEFINE_integer(
    "simulate-hosts",
    None,
    "Builds the step in a graph for so many hosts, each with the devices that the "
    "program names, none of which need exist, and says how long it communicates.",
    1,
    _MOST_HOSTS,
)


class _BadInput(Exception):
    """Ends the program with one line."""


def main(argv: Sequence[str]) -> int:
    """Prints the plan of the step that the arguments name; returns the exit status."""
    try:
        if len(argv) != 2:
            raise _BadInput(f"usage: {_USAGE}")
        picture, text = _PLOT.value, _JSON.value
        if picture is not None:
            _tried("--plot", lambda: files.check_picture("a plan", picture))
        with _hosts(_HOSTS.value):
            plan = _plan(argv[1])
        if _HOSTS.value not in (None, len(plan.hosts)):
            raise _BadInput(
                f"{argv[1]} names devices on {len(plan.hosts)} hosts of a cluster; "
                "--simulate-hosts needs the devices of one host, e.g. CPU:0"
            )
        _tried("the table", plan.print)
        if text is not None:
            _tried("--json", lambda: pathlib.Path(text).write_text(plan.to_json()))
        if picture is not None:
            _tried("--plot", lambda: plan.plot(picture))
    except _BadInput as error:
        return _fail(error)
    return 0


@contextlib.contextmanager
def _hosts(count: int | None) -> Iterator[None]:
    """In this block, so many hosts are simulated, if any are."""
    if count is None:
        yield
    else:
        with tf.Graph().as_default(), paper.on_paper(count):
            yield


def _plan(name: str) -> plans.Plan:
    """Returns the plan of the step that `module:make` makes."""
    made = _tried(f"{name}()", _maker(name))
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise _BadInput(
            f"{name}() returned a {type(made).__name__}; expected a tuple (repl, "
            "step_fn) or (repl, step_fn, input_fn)"
        )
    repl, *functions = made
    if not isinstance(repl, Replicator):
        raise _BadInput(
            f"{name}() returned a {type(repl).__name__} first; expected a Replicator"
        )
    if not callable(functions[0]):
        raise _BadInput(
            f"{name}() returned a {type(functions[0]).__name__} second; expected the "
            "step_fn"
        )
    return _tried(f"the step of {name}", lambda: _built(repl, functions))


def _built(repl: Replicator, functions: Sequence[Any]) -> plans.Plan:
    step = repl.build(*functions)
    if not tf.executing_eagerly():
        step()  # into the default graph, which no session runs
    return step.plan


def _maker(name: str) -> Callable[[], Any]:
    """Returns the function that `module:make` names."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise _BadInput(f"{name!r} is not of the form module:make")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _tried(module_name, lambda: importlib.import_module(module_name))
    made: Any = module
    for part in attribute.split("."):
        if not hasattr(made, part):
            raise _BadInput(f"module {module_name} has no {attribute}")
        made = getattr(made, part)
    if not callable(made):
        raise _BadInput(f"{name} is a {type(made).__name__}; expected a function")
    return made


def _tried(what: str, function: Callable[[], Any]) -> Any:
    """Calls a function, and makes one line of what it raises."""
    try:
        return function()
    except Exception as error:  # whatever the user's own code raises
        text = f"{what}: {type(error).__name__}: {error}"
        line = errors.line_of(error)
        if not isinstance(error, errors.ReplicatorError) and line != errors.UNKNOWN:
            text += f" (raised at {line})"
        raise _BadInput(text) from error


def _parse(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_fail(error))


def _fail(error: Exception) -> int:
    print(errors.one_line(error), file=sys.stderr)
    return 2


if __name__ == "__main__":
    app.run(main, flags_parser=_parse)
