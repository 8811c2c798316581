# SPDX-License-Identifier: Apache-2.0
"""Cases: a program with a value, in a mode; and the names that programs use."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import json
import os
import pathlib
import random
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator.costs import rates
from replicator.plan import Plan
from tests.bad_inputs import programs, values

ROOT = pathlib.Path(__file__).parents[2]

# --- The values of `bad` -------------------------------------------------------------

# Arguments on the command line, and contents of files.
_TEXTS = [
    *("", " ", "0", "1", "2", "3", "-1", "1.5", "1e3", "1e-400", "1e400", "nan", "inf"),
    *(
        "-inf",
        "0x10",
        "9223372036854775808",
        "1" * 400,
        "1" * 5000,
        "None",
        "True",
        "x",
    ),
    *("CPU:0", "CPU:0,CPU:1", "CPU:0,CPU:0", "CPU:1000000", "CPU:0,CPU:1000000", ","),
    *("GPU:0", "CPU:0,,CPU:1", "/", "/dev/null", "/dev/full", "/nonexistent/x", "."),
    *(
        "a.png",
        "/proc/x.png",
        "/dev/full.svg",
        "x" * 5000,
        "a\nb",
        "\udc80",
        "%s",
        "\\",
    ),
    *(
        ":",
        "os",
        "os:",
        ":x",
        "os:nothing",
        "os:getcwd",
        "os:path",
        "math:pi",
        "json.:x",
    ),
    *(
        "no.such:make",
        "..:x",
        "a b:c",
        "raising",
        "exiting",
        "VALUES",
        "good",
        "printing",
    ),
    *("help", "--help", "-", "--", "--nothing", "--nothing=1", "extra", "\N{SNOWMAN}"),
]
_JSON = [
    *(
        None,
        True,
        -1,
        0,
        1.5,
        10**400,
        "",
        "x",
        "1",
        [],
        [1],
        [[]],
        {},
        {"a": 1},
        [None],
    ),
    *(float("nan"), float("inf"), "\ud800", [["a", 1]], "9" * 5000),
]


def _paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            yield from _paths(value, (*path, key))


def _changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    tree = copy.deepcopy(tree)
    parent = functools.reduce(lambda node, key: node[key], path[:-1], tree)
    if value is values.Hostile:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return tree


def _texts_of(good: str) -> dict[str, Callable[[], Any]]:
    """Returns texts like a valid JSON text, each with something wrong."""
    tree = json.loads(good)
    texts: dict[str, Any] = {
        "nothing": "",
        "cut": good[: len(good) // 2],
        "twice": good * 2,
        "deep": "[" * 100_000,
        "deep value": '{"rates": ' * 50_000,
        "digits": '{"rates": ' + "1" * 5000 + "}",
        "bytes": good.encode(),
        "utf-16": good.encode("utf-16"),
        "no text": b"\xff\xfe\x00",
        "mark": "\ufeff" + good,
        "zeros": "\0" * 100,
    }
    for path, value in itertools.product(_paths(tree), [*_JSON, values.Hostile]):
        if path or value is not values.Hostile:
            name = "/".join(map(str, path))
            shown = "gone" if value is values.Hostile else repr(value)[:20]
            texts[f"{name}={shown}"] = json.dumps(_changed(tree, path, value))
    return {name: functools.partial(lambda t: t, text) for name, text in texts.items()}


_PLAN = json.dumps(
    {
        "devices": ["/device:CPU:0", "/device:CPU:1"],
        "rows": [
            {
                "primitive": "all_reduce",
                "reduction": "sum",
                "options": {"root": 1},
                "group": [0, 1],
                "operands": [[{"dtype": "float32", "shape": [2, None]}]] * 2,
                "links": [{"source": 0, "destination": 1, "nbytes": 8}],
                "algorithm": "hub",
                "path": ["while"],
                "times": 3,
                "lines": ["a.py:1 in f"],
                "backward": False,
            }
        ],
    }
)
_RATES = json.dumps({"rates": {"cpu": dataclasses.asdict(rates._DEFAULTS["cpu"])}})

POOLS: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "values": values.VALUES,
    "texts": {repr(t)[:40]: functools.partial(lambda t: t, t) for t in _TEXTS},
    "plans": _texts_of(_PLAN),
    "calibrations": _texts_of(_RATES),
}


# --- Cases ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A program, with a value, in a mode."""

    program: programs.Program
    mode: str
    value: str

    @property
    def name(self) -> str:
        """The case's name, in one line."""
        return f"{self.mode} | {self.program.line} | {self.value}"

    @property
    def cold(self) -> bool:
        """Whether it begins before TensorFlow has initialized devices."""
        return self.mode == "cold"

    def make(self) -> Any:
        """Returns the value."""
        return POOLS[self.program.pool][self.value]()


def every() -> list[Case]:
    """Returns all cases."""
    return [
        Case(program, mode, value)
        for program in programs.PROGRAMS
        for mode in program.modes
        for value in POOLS[program.pool]
    ]


def sample(count: int, seed: int) -> list[Case]:
    """Returns a random sample in which each program and each mode has its share."""
    rng = random.Random(seed)
    columns = []
    for program in programs.PROGRAMS:
        pairs = [(m, v) for m in program.modes for v in POOLS[program.pool]]
        rng.shuffle(pairs)
        columns.append([Case(program, mode, value) for mode, value in pairs])
    # Rare ones cost a process each.
    rng.shuffle(columns)
    rounds = itertools.zip_longest(*columns)
    cases = (case for round_ in rounds for case in round_ if case is not None)
    return list(itertools.islice(cases, count))


# --- Names that programs use ---------------------------------------------------------


def namespace(case: Case) -> dict[str, Any]:
    """Returns the global names of a case's program, without those of its setup."""
    names: dict[str, Any] = {
        "__name__": "user_program",
        "replicator": replicator,
        "tf": tf,
        "np": np,
        "Sonnet": Sonnet,
        "each": each,
        "pair": pair,
        "written": written,
        "by_environment": by_environment,
        "nowhere": io.StringIO(),
        "looked_at": looked_at,
        "made": made,
        "main": main,
        "folder": tempfile.mkdtemp(),
        "bad": case.make(),
    }
    if not case.cold:
        build = "clone" if case.mode == "clone" else "trace"
        names["repl"] = replicator.Replicator(["CPU:0", "CPU:1"], build=build)
        names["x"] = tf.constant([1.0, 2.0])
    return names


class Sonnet(tf.Module):
    """An optimizer in the style of Sonnet 2."""

    def apply(self, updates: Any, parameters: Any) -> None:
        """Descends."""
        for update, parameter in zip(updates, parameters, strict=True):
            parameter.assign_sub(0.1 * update)


def plain_names() -> dict[str, Any]:
    """Returns plain replacements for wrapped optimizers and for variables."""
    return {
        "plain_v": tf.Variable([1.0, 2.0]),
        "v": tf.Variable([1.0, 2.0]),
        "whole": tf.Variable(tf.ones([4, 2])),
        "plain_n": tf.Variable(1),
        "plain_keras": tf.keras.optimizers.Adam(0.1),
        "plain_v1": tf.compat.v1.train.MomentumOptimizer(0.1, 0.9),
        "plain_sonnet": Sonnet(),
    }


def each(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns a function's result for each leaf, as a tensor."""
    return tf.nest.map_structure(lambda t: function(tf.convert_to_tensor(t)), value)


def pair(value: Any) -> float:
    """Returns something that can leave a step, in place of any object."""
    del value
    return 1.0


def written(text: str | bytes) -> str:
    """Returns the name of a file with this text."""
    path = pathlib.Path(tempfile.mkdtemp(), "rates.json")
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    path.write_bytes(data)
    return str(path)


def by_environment(text: str | bytes) -> bool:
    """Makes the environment name a calibration with this text."""
    os.environ[rates.VARIABLE] = written(text)
    return True


def looked_at(plan: Plan) -> Plan:
    """Returns a plan after reading every part of it."""
    plan.print(io.StringIO())
    assert Plan.from_json(plan.to_json()) == plan or "nan" in plan.to_json().lower()
    with tempfile.TemporaryDirectory() as folder:
        plan.plot(pathlib.Path(folder, "a.svg"))
    return plan


def made(repl: replicator.Replicator, value: Any) -> Any:
    """Returns a variable made under the context, with a shape or a name."""
    with repl.context():
        return tf.Variable(1.0, name=value if isinstance(value, str) else None)


def good() -> Any:
    """Returns a Replicator and a step, like the programs of replicator.plan."""
    repl = replicator.Replicator(["CPU:0", "CPU:1"])
    return repl, lambda: repl.all_reduce(1.0)


def raising() -> None:
    """Raises a two-line error like a user's own code."""
    raise ValueError("one\ntwo")


def exiting() -> None:
    """Ends the program, as a user's own code may."""
    raise SystemExit(3)


def printing() -> Any:
    """Returns a step that does not communicate."""
    return replicator.Replicator(["CPU:0"]), lambda: 1.0


class Ended(Exception):
    """The end of a program: its status, and its standard error."""


def main(program: str, *arguments: str) -> None:
    """Runs a program as `python` would, and raises Ended.

    Args:
        program: The name of a module, or of a file in the repository.
        *arguments: Its command-line arguments.
    """
    sys.argv = [program, *arguments]
    status: Any = 0
    with tempfile.TemporaryFile() as file, _errors_to(file):
        try:
            if program.endswith(".py"):
                path = ROOT / program
                sys.path.insert(0, str(path.parent))
                runpy.run_path(str(path), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
        finally:
            sys.stderr.flush()
            file.seek(0)
            errors = file.read().decode(errors="replace")
    raise Ended(status, errors)


@contextlib.contextmanager
def _errors_to(file: Any) -> Iterator[None]:
    """Redirects this process's standard error to a file."""
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
