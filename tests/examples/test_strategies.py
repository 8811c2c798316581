# SPDX-License-Identifier: Apache-2.0
"""examples/strategies.py, run as a user runs it: in a process of its own."""

import re

import pytest

from tests.examples import programs

_VOCABULARY, _COLUMNS = 1000, 16


def rows(printed):
    """Returns the cells of the table's rows, by the first cell."""
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    found = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {name: cells for name, *cells in found}


def mebibytes(cell):
    """Returns the number in a cell of bytes."""
    return float(re.match(r"([\d.]+) MiB", cell)[1])


@pytest.mark.slow
def test_five_strategies_reach_one_loss_and_hold_what_they_say():
    small = ["--steps=30", f"--vocabulary={_VOCABULARY}", f"--columns={_COLUMNS}"]
    ended = programs.call("strategies", *small)
    assert ended.status == 0, ended.stderr
    for name in ("mirrored", "ps", "partitioned", "parallax", "bf16"):
        assert f"{name}: 100%" in ended.stderr
    actual = rows(ended.stdout)
    mebibytes_held = {
        name: [mebibytes(c) for c in cells[1:3]] for name, cells in actual.items()
    }
    sent = {name: mebibytes(cells[3]) for name, cells in actual.items()}
    losses = {name: float(cells[4]) for name, cells in actual.items()}

    whole, _ = mebibytes_held["mirrored"]
    assert mebibytes_held["mirrored"] == mebibytes_held["bf16"] == [whole, whole]
    assert sum(mebibytes_held["ps"]) == pytest.approx(whole, abs=0.02)
    assert mebibytes_held["partitioned"] == pytest.approx([whole / 2] * 2, abs=0.02)
    table = 3 * 4 * _VOCABULARY * _COLUMNS / 2**20  # with Adam's two slots
    assert mebibytes_held["parallax"] == pytest.approx([whole, whole - table], abs=0.02)
    assert sent["bf16"] < sent["mirrored"]  # what parts exchange is known in part

    exact = [losses[name] for name in losses if name != "bf16"]
    assert max(exact) - min(exact) <= 2e-4
    assert losses["bf16"] == pytest.approx(losses["mirrored"], abs=0.01)
    assert losses["mirrored"] < 6.8  # initially log(1000) = 6.91
