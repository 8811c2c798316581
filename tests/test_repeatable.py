# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest


def _drawn() -> list[object]:
    """Returns one seed's draws."""
    draws: list[object] = []

    @hypothesis.settings(max_examples=300, database=None, derandomize=False)
    @hypothesis.seed(0)
    @hypothesis.given(st.lists(st.integers(0, 10**6)), st.floats(-1, 1))
    def note(whole: list[int], broken: float) -> None:
        draws.append((whole, broken))

    note()
    return draws


def test_what_is_drawn_does_not_depend_on_what_was_imported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _drawn()
    numbers = ", ".join(f"{n}, {n / 2001}" for n in range(1000, 1200))
    (tmp_path / "imported_by_another.py").write_text(f"NUMBERS = [{numbers}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("imported_by_another")
    assert _drawn() == before
