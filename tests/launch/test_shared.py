# SPDX-License-Identifier: Apache-2.0
"""What the launcher and the program tell one another is whole at any time."""

from __future__ import annotations

import os
import pathlib

from replicator.launch.shared import Shared


def test_a_description_replaces_the_one_before_as_a_whole(
    tmp_path: pathlib.Path,
) -> None:
    shared = Shared(str(tmp_path))
    assert not os.path.exists(shared.path)
    shared.describe("one")
    with open(shared.path) as reading:  # who reads goes on with what was there
        shared.describe("another, which is longer")
        assert reading.read() == "one"
    assert pathlib.Path(shared.path).read_text() == "another, which is longer"
    assert os.listdir(tmp_path) == [os.path.basename(shared.path)]


def test_a_program_says_that_it_can_go_on_by_a_file_beside_it(
    tmp_path: pathlib.Path,
) -> None:
    shared = Shared(str(tmp_path))
    shared.describe("one")
    assert not shared.copes
    pathlib.Path(shared.path).with_name("resilient").touch()
    assert shared.copes
