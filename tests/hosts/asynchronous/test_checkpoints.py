# SPDX-License-Identifier: Apache-2.0
"""Each program goes on after the steps that it has done."""

from __future__ import annotations

import types
from typing import Any

import tensorflow as tf

from replicator.hosts.checkpoints import AsynchronousFiles
from tests.hosts.asynchronous import tables


class _First:
    """The files of the first program, whose newest checkpoint is of four steps."""

    def __init__(self, step: tf.Variable) -> None:
        self._step = step

    def restore(self) -> None:
        self._step.assign(4)

    def save(self, number: int) -> str:
        return f"checkpoint-{number}"


def test_a_program_goes_on_after_its_last_step_or_what_was_restored() -> None:
    board, steps = tables.Table(2), tf.Variable([0, 0, 0], dtype=tf.int64)
    store = types.SimpleNamespace(table=lambda name, count: steps)

    def started(program: int) -> tuple[Any, int]:
        member = types.SimpleNamespace(board=board.seen_by(program), store=store)
        step = tf.Variable(0, dtype=tf.int64)
        files = AsynchronousFiles(member, 0, _First(step), step)
        files.restore()
        return files, int(step)

    first, restored = started(0)
    second, of_another = started(1)
    assert (restored, of_another) == (4, 4)
    assert (first.save(6), second.save(9)) == ("checkpoint-6", "")
    assert [started(program)[1] for program in (0, 1)] == [6, 9]
