# SPDX-License-Identifier: Apache-2.0
"""int8 by itself: what each replica sends, beside NumPy, without a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from replicator.compressors.int8 import Int8

FINEST = np.arange(0.5, 16) / 16  # as many roundings, alike far apart


@dataclasses.dataclass
class _Link:
    """What one replica sees: the peaks of all, and its own numbers as their sum.

    Attributes:
        size: How many replicas there are.
        peaks: The sum over these of their largest numbers, one for each tensor.
        noise: What is added before rounding, from 0 to 1.
        sent: The integers that were sent.
    """

    size: int
    peaks: np.ndarray
    noise: float
    sent: list[np.ndarray] = dataclasses.field(default_factory=list)

    def sum(self, tensors: Sequence[tf.Tensor], of: Any = None) -> list[tf.Tensor]:
        if of == [None]:  # what all replicas need
            (own,) = tensors
            assert own.dtype == tf.float32 and own.shape == self.peaks.shape
            return [tf.constant(self.peaks)]
        assert of is None
        self.sent = [tensor.numpy() for tensor in tensors]
        return list(tensors)

    def uniform(self, shape: Any, dtype: tf.DType) -> tf.Tensor:
        return tf.fill(shape, tf.constant(self.noise, dtype))


def _sent(
    own: Sequence[Sequence[np.ndarray]], noise: float
) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Returns the integers that replicas send, and what these say that they sent.

    Args:
        own: `own[r]` are replica r's tensors.
        noise: What is added before rounding.
    """
    peaks = np.sum([[np.abs(t).max(initial=0) for t in one] for one in own], 0)
    integers, sent = [], []
    for tensors in own:
        link = _Link(len(own), peaks.astype(np.float32), noise)
        sums = Int8().reduce([tf.constant(one) for one in tensors], link)
        for total, one in zip(sums.totals, sums.sent, strict=True):
            np.testing.assert_array_equal(total, one)  # as the sum is but its own
        integers.append(link.sent)
        sent.append([one.numpy() for one in sums.sent])
    return integers, sent


def _steps(own: Sequence[Sequence[np.ndarray]]) -> list[float]:
    """Returns the step of each tensor, as the docstring has it."""
    peaks = np.sum([[np.abs(t).max() for t in one] for one in own], 0)
    return list(peaks / (127 - len(own)))


def _random(num_replicas: int, dtype: Any = np.float32) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(num_replicas)
    return [
        [(scale * rng.normal(size=[20])).astype(dtype) for scale in (1e-3, 100.0)]
        for _ in range(num_replicas)
    ]


@pytest.mark.parametrize("num_replicas", [1, 5])
@pytest.mark.parametrize("noise", [0.0, 0.5, 1 - 2**-10])
def test_whole_steps_are_sent_that_are_off_by_less_than_one(
    noise: float, num_replicas: int
) -> None:
    own = _random(num_replicas)
    steps = _steps(own)
    integers, sent = _sent(own, noise)
    for exact, whole, told in zip(own, integers, sent, strict=True):
        for k, step in enumerate(steps):
            assert whole[k].dtype == np.int8
            np.testing.assert_allclose(told[k], whole[k] * step, rtol=1e-6)
            expected = np.floor(exact[k] / step + noise)
            assert np.abs(whole[k] - expected).max() <= 1  # up to the last bit
            assert np.mean(whole[k] == expected) > 0.9
            assert np.abs(told[k] - exact[k]).max() <= step * (1 + 1e-4)


@pytest.mark.parametrize("num_replicas", [1, 3, 64])
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_fit_into_8_bits_even_if_all_are_the_largest(
    sign: int, num_replicas: int
) -> None:
    largest = [tf.constant([sign * 3.0e4])]
    for noise in (0.0, 1 - 2**-10):
        link = _Link(num_replicas, np.float32([num_replicas * 3.0e4]), noise)
        Int8().reduce(largest, link)
        total = num_replicas * int(link.sent[0][0])
        # No more is given away than what rounding up may add.
        assert 127 - 2 * num_replicas <= abs(total) <= 127


def test_rounding_is_right_on_average() -> None:
    own = _random(2)
    average = np.mean([_sent(own, noise)[1] for noise in FINEST], 0)
    for k, step in enumerate(_steps(own)):
        for exact, found in zip(own, average, strict=True):
            assert np.abs(found[k] - exact[k]).max() <= step / len(FINEST)


def test_zeros_and_nothing_stay_what_they_are() -> None:
    own = [[np.zeros([3], np.float32), np.ones([0, 2], np.float32)]] * 2
    for noise in (0.0, 1 - 2**-10):
        _, sent = _sent(own, noise)
        for zeros, nothing in sent:
            np.testing.assert_array_equal(zeros, [0, 0, 0])
            assert nothing.shape == (0, 2)


@pytest.mark.parametrize("spoilt", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_spoils_all_that_is_sent(spoilt: float) -> None:
    tensors = [tf.constant([1.0, spoilt]), tf.constant([2.0])]
    taken: list[tf.Tensor] = []

    class Link(_Link):
        def sum(self, tensors: Sequence[tf.Tensor], of: Any = None) -> list[tf.Tensor]:
            taken.extend(tensors)
            return list(tensors)

    sums = Int8().reduce(tensors, Link(1, np.zeros([2]), 0.5))
    np.testing.assert_array_equal(taken[0], [np.inf, 2])  # peaks
    assert not np.isfinite(sums.totals[0]).any()
    np.testing.assert_allclose(sums.totals[1], [2.0], rtol=0.01)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_are_sent_in_their_own_steps(dtype: Any) -> None:
    own = _random(2, dtype)
    _, sent = _sent([one[1:] for one in own], 0.5)
    for told, exact in zip(sent, own, strict=True):
        assert told[0].dtype == dtype
        np.testing.assert_allclose(told[0], exact[1], atol=_steps(own)[1])


def test_more_replicas_than_can_be_added_up_are_refused() -> None:
    link = _Link(65, np.ones([1], np.float32), 0.5)
    with pytest.raises(errors.ArgumentError, match="(?s)65 replicas.* 64 .*bf16"):
        Int8().reduce([tf.ones([1])], link)
