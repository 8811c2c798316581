# SPDX-License-Identifier: Apache-2.0
"""The memory of a large embedding: half on each of two devices.

While a variable is created, the host also holds its whole initial value.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.strategy import large_table

ROOT = pathlib.Path(__file__).parents[2]
TABLE = 4 * large_table.ROWS * large_table.COLUMNS
TOTAL = 3 * TABLE  # with Adam's two slots
SCALARS = 64  # bytes: the optimizer's counter and its rate


@pytest.mark.slow
def test_parts_are_created_as_parts_and_each_device_holds_half() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tests.strategy.large_table"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout.splitlines()[-1])
    for nbytes in results["held"]:
        assert TOTAL / 2 <= nbytes <= TOTAL / 2 + SCALARS
    assert results["peak"] <= 1.15 * (TOTAL + TABLE), results
    assert results["resident"] >= 0.9 * TOTAL, (
        results
    )  # all of it exists, and was counted
    first, second = results["losses"]
    assert 0 < second < first
