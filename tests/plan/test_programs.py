# SPDX-License-Identifier: Apache-2.0
"""Errors of users' modules name the user's line, and modules may define flags."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import flags

import replicator
from replicator.command_line import BadInput
from replicator.plan import __main__, programs
from tests import mains


def _mismatched(x: tf.Tensor) -> tf.Tensor:
    return tf.matmul(x, tf.ones([7, 3]))  # in a helper


def _converted(x: tf.Tensor) -> tf.Tensor:
    if tf.reduce_sum(x) > 0:
        x += 1
    return tf.matmul(x, tf.ones([8, 3]))  # in step_fn


def _in_loop(x: tf.Tensor) -> tf.Tensor:
    for _ in tf.range(3):
        x = _mismatched(x)
    return x


def _in_numpy(x: tf.Tensor) -> tf.Tensor:
    return x + np.reshape(np.ones(5), [2, 3])  # a package raises


def _in_python(x: tf.Tensor) -> tf.Tensor:
    def fail(_: Any) -> None:
        raise KeyError("lost")  # while the step runs

    return tf.py_function(fail, [x], tf.float32)


def _long(x: tf.Tensor) -> tf.Tensor:
    raise ValueError("long " * 1000)  # a long text


def _error(step_fn: Callable[..., Any]) -> str:
    repl = replicator.Replicator(["CPU:0", "CPU:1"])

    def run() -> Sequence[Any]:
        return repl.run(step_fn, lambda: tf.ones([4, 5]))

    with pytest.raises(BadInput) as caught:
        programs.attempt("it", run)
    return replicator.errors.one_line(caught.value)


@pytest.mark.parametrize(
    ("step_fn", "line", "name"),
    [
        (_converted, "# in step_fn", "_converted"),
        (_mismatched, "# in a helper", "_mismatched"),
        (_in_loop, "# in a helper", "_mismatched"),
        (_in_numpy, "# a package raises", "_in_numpy"),
        (_in_python, "# while the step runs", "fail"),
        (_long, "# a long text", "_long"),
    ],
)
def test_what_a_step_raises_is_told_with_the_users_line(
    step_fn: Callable[..., Any], line: str, name: str
) -> None:
    with open(__file__) as file:
        number = mains.line_of(f"  {line}", file.read())
    assert _error(step_fn).endswith(f"test_programs.py:{number} in {name})")


def test_stacks_of_python_functions_are_left_out() -> None:
    message, _, _ = _error(_in_python).partition(" (raised at ")
    assert message == "it: UnknownError: KeyError: 'lost'"


# --- Flags of the module --------------------------------------------------------------

_OF_ABSL = """
from absl import flags
from absl.testing import flagsaver
import replicator

_JSON = flags.DEFINE_integer("json", 3, "As the program has one.")


def make():
    repl = replicator.Replicator(["CPU:0", "CPU:1"])
    return repl, lambda: repl.all_reduce([1.0] * _JSON.value)
"""
_OF_ARGPARSE = """
import argparse
import replicator


def make():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=int, default=3)
    count = parser.parse_args().json
    repl = replicator.Replicator(["CPU:0", "CPU:1"])
    return repl, lambda: repl.all_reduce([1.0] * count)
"""


@pytest.mark.parametrize("text", [_OF_ABSL, _OF_ARGPARSE])
def test_a_module_may_have_flags_of_the_names_of_the_programs(
    text: str, tmp_path: pathlib.Path, monkeypatch: Any, capsys: Any
) -> None:
    defined = flags.FLAGS.flags_by_module_dict()
    for other in list(defined):  # those of programs that other tests have imported
        if not other.startswith(("absl", "replicator", sys.argv[0])):
            monkeypatch.delitem(defined, other)

    def run(*arguments: str) -> Any:
        name = mains.module_of(text, tmp_path, monkeypatch)
        return mains.status(__main__.main, f"{name}:make", *arguments)

    for given, size in (((), 12), (("--", "--json=5"), 20)):
        assert run(*given) == 0
        assert f"{size} B" in capsys.readouterr().out
    assert run("--", "--jsn=5") == 2
    assert "jsn" in capsys.readouterr().err
    assert run("--other=5") == 2
    assert "the module's own flags go after --" in capsys.readouterr().err
