# SPDX-License-Identifier: Apache-2.0
"""Every primitive works at every place; and the program can report failures."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from benchmarks import anywhere
from benchmarks.places import PLACES
from benchmarks.programs import PROGRAMS

_ROWS = max(len(PROGRAMS), len(PLACES))


@pytest.mark.battery(3)
@pytest.mark.parametrize("k", range(_ROWS))
def test_each_program_and_each_place_works(k: int) -> None:
    name, place = (list(names)[k % len(names)] for names in (PROGRAMS, PLACES))
    assert anywhere.try_replicator(PROGRAMS[name], PLACES[place]) == anywhere.WORKS


def test_what_is_wrong_and_what_raises_is_called_so() -> None:
    right = [np.ones(2), np.zeros(2)]
    assert anywhere.judge(right, right) == anywhere.WORKS
    assert anywhere.judge(right[::-1], right) == anywhere.WRONG
    assert anywhere.judge([np.ones(1), np.zeros(1)], right) == anywhere.WRONG
    program = PROGRAMS["broadcast"]
    broken = type(program)(lambda repl, x: repl.broadcast(x, 7), program.plain)
    verdict = anywhere.try_replicator(broken, PLACES["cond"])
    assert verdict == f"{anywhere.REFUSED} (ArgumentError)"


@pytest.mark.slow
def test_the_rival_is_tried_in_a_process_of_its_own() -> None:
    assert anywhere.try_mirrored_apart("all_reduce", "cond", 60).startswith("refused")
    assert anywhere.try_mirrored_apart("shift", "cond", 60) == anywhere.ABSENT


def test_the_table_of_a_file_is_replaced(tmp_path: pathlib.Path) -> None:
    cells = {"all_reduce": dict.fromkeys(PLACES, ("works", "hangs"))}
    assert anywhere.table(cells).row_count == 1
    file = tmp_path / "README.md"
    file.write_text(f"before\n{anywhere.BEGIN}\nold\n{anywhere.END}\nafter\n")
    for _ in range(2):
        anywhere.update(file, anywhere.markdown(cells))
        text = file.read_text()
        assert text.startswith("before\n") and text.endswith("after\n")
        assert "old" not in text
        assert text.count("| all_reduce | works · hangs |") == 1
    file.write_text("nothing here")
    for path in (file, tmp_path / "none.md"):
        with pytest.raises(SystemExit, match=f"{path.name}: "):
            anywhere.update(path, "text")
