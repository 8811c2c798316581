# SPDX-License-Identifier: Apache-2.0
"""Random programs of all replicas, compared with the simulator; and wrong ones.

A failing program is shrunk, and printed as a step function. The slow tests, of 2,000
programs, are in test_many_*.py.
"""

from __future__ import annotations

import pytest

from tests.spmd import changes, many

_FAST = {"eager": 40, "function": 10, "session": 10, "tape": 6, "tf.gradients": 4}


@pytest.mark.battery(5)
@pytest.mark.parametrize("kind", _FAST)
def test_programs(kind: str) -> None:
    many.check_programs(kind, _FAST[kind])


@pytest.mark.battery(6)
@pytest.mark.parametrize("kind", changes.KINDS)
def test_wrong_programs(kind: str) -> None:
    many.check_wrong_programs(kind, 2)
