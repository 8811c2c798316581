# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_names_of_tests_are_the_same_in_each_process() -> None:
    # The processes that pytest-xdist starts hash strings differently, and it refuses to
    # run tests that not all of them have.
    def names(seed: str) -> list[str]:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        return [line for line in run.stdout.splitlines() if "::" in line]

    first, second = names("1"), names("2")
    assert len(first) > 1000
    assert set(first) ^ set(second) == set()
