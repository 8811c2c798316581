# SPDX-License-Identifier: Apache-2.0
"""What two processes read in full is the same, or refused in both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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
    found = _checked(make(), make())
    assert [(own.process, own.always) for own in found] == [(0, False), (1, False)]


def _generated() -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(lambda: iter([1]), tf.int64)


def _out_of_order(**options: Any) -> tf.data.Dataset:
    return RANGE(6).interleave(RANGE, num_parallel_calls=2, **options)


def _unordered() -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = False
    return RANGE(6).with_options(options)


@pytest.mark.parametrize(
    ("make", "always"),
    [
        (_generated, True),
        (lambda: _generated().repeat(), True),
        (lambda: RANGE(6).map(lambda x: tf.py_function(int, [x], tf.int64)), True),
        (lambda: _out_of_order(deterministic=False), True),
        (_unordered, True),
        (_out_of_order, False),
    ],
)
def test_elements_are_compared_where_they_may_differ(
    make: Callable[[], tf.data.Dataset], always: bool
) -> None:
    assert [own.always for own in _checked(make(), make())] == [always] * 2


@pytest.mark.parametrize("added", [0, 1])
def test_arrays_are_compared(added: int) -> None:
    arrays = [np.arange(100.0).reshape([50, 2]) + k for k in (0, added)]
    found = _checked(*map(tf.data.Dataset.from_tensor_slices, arrays))
    for k, result in enumerate(found):
        if added:
            assert isinstance(result, replicator.MismatchError)
            assert "float64[50, 2] with digest" in str(result)
        else:
            assert result.process == k


@pytest.mark.parametrize("passed", [(0.25, 0.5), (0.5, 0.5)])
def test_values_for_all_replicas_are_compared(passed: tuple[float, float]) -> None:
    found = as_threads.together(
        *(
            lambda peers, value=value: shared_pipelines.check_values(
                "step_fn", [tf.constant(value), tf.constant([2, 3])], peers
            )
            for value in passed
        )
    )
    if passed[0] == passed[1]:
        assert found == [None, None]
        return
    for error in found:
        assert isinstance(error, replicator.MismatchError)
        for part in ("passes values to step_fn", "float32[] 0.25", "float32[] 0.5"):
            assert part in str(error)
        assert "Fix: pass the same values on every host; or a PerReplica" in str(error)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.5), "float32[] 0.5"),
        (np.asarray([1, 2], np.int32), "int32[2] with digest "),
        (np.asarray([b"ab", b"c"], object), "object[2] with digest "),
    ],
)
def test_digests_of_values(value: Any, text: str) -> None:
    assert shared_pipelines.digest(value).startswith(text)
    assert shared_pipelines.digest(value) == shared_pipelines.digest(value.copy())


def test_digests_of_texts_differ_if_the_texts_do() -> None:
    one, other = (np.asarray(t, object) for t in ([b"ab", b"c"], [b"a", b"bc"]))
    assert shared_pipelines.digest(one) != shared_pipelines.digest(other)


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
    tf.random.set_seed(None)  # another test may have set one
    for error in _checked(*(RANGE(6).shuffle(6) for _ in range(2))):
        assert isinstance(error, replicator.InputError)
        assert "tf.random.set_seed" in str(error)


def test_a_device_for_each_replica_is_of_this_process() -> None:
    names = [f"/job:worker/task:{k}/device:CPU:{n}" for k in (0, 1) for n in (0, 1)]
    world = World.divided((0, 0, 1, 1), 1, names)
    assert shared_pipelines.devices(world) == [names[2], names[2], *names[2:]]
