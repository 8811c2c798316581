# SPDX-License-Identifier: Apache-2.0
"""The gradients of 140 random programs, compared with differences of the losses."""

from __future__ import annotations

import pytest

from tests.spmd import many


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [("tape", 60), ("tf.gradients", 60), ("gradients in sessions", 20)],
)
def test_gradients(kind: str, count: int) -> None:
    many.check_programs(kind, count, seed=1)
