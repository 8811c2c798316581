# SPDX-License-Identifier: Apache-2.0
"""One line of what the user's code raises names the line of it, however it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.command_line import BadInput
from replicator.plan import programs
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
        programs.tried("it", run)
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
    said, _, _ = _error(_in_python).partition(" (raised at ")
    assert said == "it: UnknownError: KeyError: 'lost'"
