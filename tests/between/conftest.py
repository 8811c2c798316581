# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a place to launch from."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tests.launch.stub import Place


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[Place]:
    """Whose processes have a mark, and of which nothing is left afterwards."""
    made = Place(tmp_path)
    yield made
    made.expect_nothing_left()
