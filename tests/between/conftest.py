# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a place to launch from, and the results of two processes' programs."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.between import processes
from tests.launch.stub import Place


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[Place]:
    """A place that marks its processes, none of which may remain afterwards."""
    new_place = Place(tmp_path)
    yield new_place
    new_place.expect_nothing_left()


@pytest.fixture(scope="session")
def told() -> list[dict[str, Any]]:
    """Each host's results of several programs, by name.

    The same two processes run them one after the other: starting two takes longer than
    each program.
    """
    names = (
        "test_inputs_end.input_ends",
        "test_mismatches.mismatches",
        "test_proven.proofs",
    )
    return processes.run("several", [1, 1], *names)
