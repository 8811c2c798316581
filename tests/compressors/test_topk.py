# SPDX-License-Identifier: Apache-2.0
"""topk by itself: the largest numbers of each replica, beside NumPy, without a step."""

from __future__ import annotations

import numpy as np
import pytest

from replicator.compressors.topk import TopK
from tests.compressors.laws import reduced

SHAPES = ((20, 3), (7,), (1,), ())
RNG = np.random.default_rng(0)


def _largest(x: np.ndarray, ratio: float) -> np.ndarray:
    """Returns a tensor with all but its largest numbers zeros."""
    count = max(1, int(np.ceil(ratio * x.size)))
    kept = np.argsort(-np.abs(x).ravel(), kind="stable")[:count]
    result = np.zeros(x.size, x.dtype)
    result[kept] = x.ravel()[kept]
    return result.reshape(x.shape)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("count", [1, 3])
def test_each_sends_its_largest_numbers(count: int, ratio: float, dtype: str) -> None:
    own = [[RNG.normal(size=s).astype(dtype) for s in SHAPES] for _ in range(count)]
    totals, sent = reduced(TopK(ratio), own)
    expected = [[_largest(x, ratio) for x in tensors] for tensors in own]
    for one, two in zip(sent, expected, strict=True):
        for found, largest in zip(one, two, strict=True):
            np.testing.assert_array_equal(found, largest)
    for k, total in enumerate(totals):
        assert total.dtype == dtype
        np.testing.assert_allclose(total, sum(one[k] for one in expected), rtol=1e-6)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_sent_first(spoilt: float) -> None:
    own = [[np.float32([1e30, spoilt, 2.0, 3.0])], [np.float32([0.0, 1.0, 0.0, 0.0])]]
    (total,), _ = reduced(TopK(0.25), own)
    assert not np.isfinite(total[1]) and not total[[0, 2, 3]].any()


def test_of_nothing_nothing_is_sent() -> None:
    (total,), _ = reduced(TopK(0.5), [[np.zeros([0, 2], np.float32)]] * 2)
    assert total.shape == (0, 2)
