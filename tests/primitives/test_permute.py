# SPDX-License-Identifier: Apache-2.0
"""permute and shift: who receives what, in groups too; the others receive zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers


@pytest.mark.parametrize("offset", [0, 1, 2, -1, 7])
def test_shift_goes_around_the_ring_and_back(offset: int) -> None:
    repl = helpers.make(4)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        there = repl.shift(helpers.opaque(repl.replica_id), offset)
        back = [((r + offset) % 4, r) for r in range(4)]
        return there, repl.permute(there, back)

    there, back = repl.run(step)
    np.testing.assert_array_equal(there, np.roll(np.arange(4), offset))
    np.testing.assert_array_equal(back, np.arange(4))


def test_shift_in_a_group() -> None:
    repl = helpers.make(4)
    ring = [0, 2, 3]

    def step() -> tf.Tensor:
        x = helpers.opaque(repl.replica_id)
        return repl.shift(x, group=ring) if repl.replica_id in ring else x

    assert [int(x) for x in repl.run(step)] == [3, 1, 0, 2]


@pytest.mark.parametrize(
    ("pairs", "want"), [([], [0, 0, 0]), ([(2, 0), (0, 1)], [3, 1, 0])]
)
def test_who_receives_nothing_gets_zeros(pairs: Any, want: Any) -> None:
    repl = helpers.make(3)
    results = repl.run(lambda: repl.permute(helpers.opaque(repl.replica_id + 1), pairs))
    assert [int(x) for x in results] == want
