# SPDX-License-Identifier: Apache-2.0
"""600 random programs on which the replicas disagree, of each kind in turn."""

from __future__ import annotations

import pytest

from tests.spmd import changes, many


@pytest.mark.slow
@pytest.mark.parametrize("kind", changes.KINDS)
def test_wrong_programs(kind: str) -> None:
    many.check_wrong_programs(kind, 30, seed=1)
