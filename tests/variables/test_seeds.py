# SPDX-License-Identifier: Apache-2.0
"""The position of the seed in a generator's state, and its offsets by replica."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator.variables.seeds import Seed


def test_the_states_of_generators_are_known() -> None:
    keras = tf.keras.random.SeedGenerator(5)
    state = keras.state.value
    assert Seed.of(state) == Seed(position=0, resets=False)
    generator = tf.random.Generator.from_seed(5)
    assert Seed.of(generator.state) == Seed(position=-1, resets=True)


@pytest.mark.parametrize(
    "variable",
    [
        lambda: tf.Variable([1, 2], name="counts"),
        lambda: tf.Variable([1.0, 2.0], name="StateVar"),
        lambda: tf.Variable(1, name="StateVar"),
    ],
    ids=["name", "dtype", "rank"],
)
def test_other_variables_hold_no_seed(variable) -> None:
    assert Seed.of(variable()) is None


@pytest.mark.parametrize("position", [0, -1])
def test_offsets_change_the_seed_alone_and_differ_by_replica(position: int) -> None:
    like = tf.Variable([0, 0, 0], dtype=tf.int64)
    offsets = [Seed(position, False).offset(like, r).numpy() for r in range(8)]
    assert not offsets[0].any()
    assert len({int(offset[position]) for offset in offsets}) == 8
    for offset in offsets[1:]:
        assert offset.dtype == np.int64
        assert np.count_nonzero(offset) == 1
