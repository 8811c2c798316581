# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a place to launch from, and what two processes tell of all they tried."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.between import processes
from tests.launch.stub import Place


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[Place]:
    """Whose processes have a mark, and of which nothing is left afterwards."""
    made = Place(tmp_path)
    yield made
    made.expect_nothing_left()


@pytest.fixture(scope="session")
def told() -> list[dict[str, Any]]:
    """What each of two hosts returned of several programs, by their names.

    They are run one after the other by the same two processes: to start two takes
    longer than what each program does.
    """
    return processes.run("several", [1, 1], "input_ends", "mismatches", "proofs")
