# SPDX-License-Identifier: Apache-2.0
"""What two processes read in full is the same, or refused in both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator.inputs import shared_pipelines
from replicator.world import World
from tests.cluster import as_threads

RANGE = tf.data.Dataset.range


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch) -> None:
    as_threads.fake_store(monkeypatch)


def _checked(*datasets: tf.data.Dataset) -> list[Any]:
    """Returns what the check of each process returns, or raises."""
    return as_threads.together(
        *(
            lambda peers, mine=dataset: shared_pipelines.check(mine, mine, peers)
            for dataset in datasets
        )
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: RANGE(6).batch(2),
        lambda: RANGE(6).shuffle(6, seed=1),
        lambda: RANGE(6).repeat(),
        lambda: RANGE(6).filter(lambda x: x > 3),  # of an unknown length
    ],
)
def test_the_same_is_read(make: Callable[[], tf.data.Dataset]) -> None:
    assert _checked(make(), make()) == [None, None]


@pytest.mark.parametrize(
    "other",
    [RANGE(7).batch(2), RANGE(6).batch(3, drop_remainder=True), RANGE(6).batch(3)],
    ids=["element_spec", "shape", "length"],
)
def test_both_refuse_what_differs(other: tf.data.Dataset) -> None:
    for error in _checked(RANGE(6).batch(2), other):
        assert isinstance(error, replicator.MismatchError)
        assert "every host reads a dataset, and they differ" in str(error)


def test_numbers_drawn_without_a_seed_are_refused() -> None:
    for error in _checked(*(RANGE(6).shuffle(6) for _ in range(2))):
        assert isinstance(error, replicator.InputError)
        assert "tf.random.set_seed" in str(error)


def test_a_device_for_each_replica_is_of_this_process() -> None:
    names = [f"/job:worker/task:{k}/device:CPU:{n}" for k in (0, 1) for n in (0, 1)]
    world = World.divided((0, 0, 1, 1), 1, names)
    assert shared_pipelines.devices(world) == [names[2], names[2], *names[2:]]
