# SPDX-License-Identifier: Apache-2.0
"""The files that `make wheel` requires exist; a full run needs a network."""

from __future__ import annotations

import replicator
from tools import wheel


def test_the_version_is_read_without_an_import() -> None:
    assert wheel.version() == replicator.__version__


def test_files_that_an_archive_lacks_are_found() -> None:
    names = ["replicator-0.1.0/LICENSE", "replicator/py.typed"]
    assert wheel.missing(names, ("LICENSE", "py.typed")) == []
    assert wheel.missing(names, ("LICENSE", "README.md")) == ["README.md"]


def test_all_that_is_asked_for_is_in_the_repository() -> None:
    for name in (*wheel._IN_WHEEL, *wheel._IN_SDIST):
        assert (wheel._ROOT / name).exists(), name


def test_the_step_that_is_tried_is_a_program() -> None:
    compile(wheel._STEP, "step", "exec")
