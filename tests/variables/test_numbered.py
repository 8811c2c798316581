# SPDX-License-Identifier: Apache-2.0
"""Calls find in checkpoints what was made for them, in any process."""

from __future__ import annotations

import tensorflow as tf

from replicator.variables.numbered import Numbered


def _made(calls: list[str]) -> tuple[Numbered, list[tf.Variable]]:
    numbered = Numbered("kept")
    variables = []
    for call in calls:
        group = numbered.group(call)
        group.variable = tf.Variable(0)
        variables.append(group.variable)
    return numbered, variables


def test_equal_calls_are_told_apart_by_their_order_alone(tmp_path: object) -> None:
    numbered, variables = _made(["a", "b", "a"])
    for k, variable in enumerate(variables):
        variable.assign(k)
    path = tf.train.Checkpoint(kept=numbered).write(f"{tmp_path}/kept")
    other, restored = _made(["b", "a", "a"])
    tf.train.Checkpoint(kept=other).read(path).assert_consumed()
    assert [int(variable) for variable in restored] == [1, 0, 2]


def test_names_are_the_same_in_every_process() -> None:
    # Of a digest, not of Python's hash, which is another one in each process.
    numbered = Numbered("kept")
    names = [numbered.group("call 0").name for _ in range(2)]
    assert names == ["g67d80dd9_0", "g67d80dd9_1"]
