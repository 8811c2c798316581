# SPDX-License-Identifier: Apache-2.0
"""What cells of pages show: pictures of what is moved, commands, forms, long lines."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import tensorflow as tf

from docs.helpers import commands, forms, pictures, wide
from replicator.forms.engine import WholeBatchFunction
from tests import helpers

# --- Pictures of communication show exactly what it moved -----------------------------

A1, A2, B1, B2, C1, C2 = (
    (replica, place) for replica in range(3) for place in range(2)
)
_BOTH = ((A1, B1, C1), (A2, B2, C2))


@pytest.mark.parametrize(
    ("step_fn", "cells"),
    [
        (lambda repl, x: repl.all_reduce(x), [_BOTH] * 3),
        (lambda repl, x: repl.all_reduce(x, "max"), [((C1,), (C2,))] * 3),
        (lambda repl, x: repl.reduce(x, root=1), [(), _BOTH, ()]),
        # Zeros have no source.
        (
            lambda repl, x: repl.permute(x, [(0, 2)]),
            [((), ()), ((), ()), ((A1,), (A2,))],
        ),
        (
            lambda repl, x: tf.stack(repl.map_gather(lambda k: x[k], [0, 1])),
            [((A1,), (B2,))] * 3,
        ),
    ],
    ids=["sum", "max", "reduce", "permute", "map_gather"],
)
def test_a_cell_has_the_values_it_is_made_of(step_fn: Any, cells: Any) -> None:
    repl = helpers.make(3)
    ends = pictures.endings(repl, lambda x: step_fn(repl, x), 2)
    assert [end.cells for end in ends] == cells


def test_rows_are_those_of_the_result() -> None:
    repl = helpers.make(3)
    ends = pictures.endings(repl, lambda x: repl.all_gather(x), 2)
    assert {(len(end.cells), end.columns) for end in ends} == {(6, 2)}


@pytest.mark.parametrize(
    ("step_fn", "arrows", "told"),
    [
        (lambda repl, x: repl.shift(x), 3, "replica 0: c1, c2; replica 1: a1, a2"),
        (lambda repl, x: repl.broadcast(x, root=1), 3, "replica 2: b1, b2"),
        (
            lambda repl, x: x if repl.replica_id else tf.zeros_like(x),
            2,
            "replica 0: 0, 0",
        ),
    ],
)
def test_a_picture_has_an_arrow_for_each_source(
    step_fn: Any, arrows: int, told: str
) -> None:
    repl = helpers.make(3)
    html = pictures.picture(repl, lambda x: step_fn(repl, x), size=2).data
    assert html.count("<path") == 2 * arrows  # a line, and its head
    assert told in html


# --- Forms ----------------------------------------------------------------------------


def test_a_drawing_of_forms_shows_what_is_converted() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(tf.ones([3, 1]))

    def train_step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.sort(x, 0) @ w)
        w.assign_sub(tape.gradient(loss, w))

    function = WholeBatchFunction(train_step, repl, [tf.TensorSpec([None, 3])])
    drawn = forms.draw(function.program((0,)).plan).data
    calls = re.findall(r">(all_reduce|all_gather|its part)<", drawn)
    assert calls == ["all_gather"]  # of what is sorted; what follows is the same on all
    assert "AssignSubVariableOp" in drawn


# --- Commands and long lines ----------------------------------------------------------


def test_a_command_is_shown_with_its_output_without_colors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    html = commands.run(
        "python -c 'import rich; rich.print(\"[red]a[/red]  <b>\")'"
    ).data
    assert "$ python -c" in html
    assert html.endswith("\na  &lt;b&gt;</pre>")


def test_a_command_that_fails_says_why() -> None:
    command = "import sys; print('oh no', file=sys.stderr); exit(3)"
    with pytest.raises(RuntimeError, match=r"(?s)exit.* ended with 3: oh no"):
        commands.run(f'python -c "{command}"')


def test_examples_are_those_of_this_repository(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "load_examples" in commands.run("python -m tokenize examples/digits.py").data


def test_lines_and_signs_of_wide_text_stay() -> None:
    html = wide.wide("a  <b>\n" + "x" * 200).data
    assert "a  &lt;b&gt;\n" + "x" * 200 + "</pre>" in html
    assert "white-space: pre;" in html
