# SPDX-License-Identifier: Apache-2.0
"""1,360 random programs, compared with the simulator."""

from __future__ import annotations

import pytest

from tests.spmd import many


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize(("kind", "count"), [("eager", 150)])
def test_programs(kind: str, count: int, seed: int) -> None:
    many.check_programs(kind, count, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "session"])
def test_programs_in_graphs(kind: str) -> None:
    many.check_programs(kind, 80, seed=1)
