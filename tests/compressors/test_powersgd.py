# SPDX-License-Identifier: Apache-2.0
"""PowerSGD by itself: products of thin matrices, beside NumPy's own decompositions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replicator.compressors.powersgd import PowerSGD
from tests.compressors.laws import reduced

RNG = np.random.default_rng(0)
SHAPE = (12, 10)


def _matrices(count: int, rank: int, shape: Any = SHAPE) -> list[list[np.ndarray]]:
    """Returns a matrix for each replica, whose sum is of a rank."""
    left = RNG.normal(size=[shape[0], rank])
    return [
        [(left @ RNG.normal(size=[rank, shape[1]])).astype("f")] for _ in range(count)
    ]


def _best(matrix: np.ndarray, rank: int) -> np.ndarray:
    """Returns the product of that rank that is the nearest to a matrix."""
    left, sizes, right = np.linalg.svd(matrix.astype("d"))
    return (left[:, :rank] * sizes[:rank]) @ right[:rank]


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("warm_start", [True, False])
def test_matrices_of_so_small_a_rank_are_exact(
    warm_start: bool, count: int, rank: int
) -> None:
    own = _matrices(count, rank)
    (total,), sent = reduced(PowerSGD(rank, warm_start=warm_start), own)
    np.testing.assert_allclose(total, np.sum(own, 0)[0], rtol=1e-3, atol=1e-4)
    for exact, found in zip(own, sent, strict=True):
        np.testing.assert_allclose(found[0], exact[0], rtol=1e-3, atol=1e-4)


def test_what_replicas_sent_is_all_that_they_receive_of_any_matrix() -> None:
    own = _matrices(3, 10)
    (total,), sent = reduced(PowerSGD(2), own)
    assert np.linalg.matrix_rank(total, tol=1e-3) == 2
    np.testing.assert_allclose(np.sum(sent, 0)[0], total, rtol=1e-3, atol=1e-4)
    whole = np.sum(own, 0)[0]
    # It is what of the sum lies in a space of two dimensions: the rest is orthogonal.
    rest = (whole - total).astype("d")
    assert abs(np.sum(rest * total)) < 1e-4 * np.sum(whole**2)


def test_each_call_is_a_turn_of_a_power_iteration() -> None:
    own, kept = _matrices(2, 10), [{}, {}]
    whole = np.sum(own, 0)[0]
    best = np.linalg.norm(whole - _best(whole, 2))
    errors = []
    for _ in range(12):
        (total,), _ = reduced(PowerSGD(2), own, kept)
        errors.append(np.linalg.norm(whole - total))
    assert errors[0] > 1.01 * best > errors[-1] >= 0.999 * best
    assert all(b <= a * 1.0001 for a, b in zip(errors, errors[1:], strict=False))


def test_what_would_not_shrink_is_sent_as_it_is() -> None:
    own = [[RNG.normal(size=s).astype("f") for s in ((30,), (4, 4), ())] for _ in "ab"]
    totals, sent = reduced(PowerSGD(2), own)
    for k, total in enumerate(totals):
        np.testing.assert_allclose(total, own[0][k] + own[1][k], rtol=1e-6)
        np.testing.assert_array_equal(sent[0][k], own[0][k])


def test_kernels_are_matrices_of_their_outputs() -> None:
    own = _matrices(2, 1)
    as_matrices, _ = reduced(PowerSGD(1), own)
    kernels = [[one[0].reshape(3, 4, 10)] for one in own]
    as_kernels, _ = reduced(PowerSGD(1), kernels)
    np.testing.assert_array_equal(as_kernels[0], as_matrices[0].reshape(3, 4, 10))


def test_zeros_are_sent_and_do_not_spoil_what_follows() -> None:
    kept = [{}, {}]
    zeros = [[np.zeros(SHAPE, np.float32)]] * 2
    (total,), _ = reduced(PowerSGD(1), zeros, kept)
    np.testing.assert_array_equal(total, zeros[0][0])
    own = _matrices(2, 1)
    (total,), _ = reduced(PowerSGD(1), own, kept)
    np.testing.assert_allclose(total, np.sum(own, 0)[0], rtol=1e-3, atol=1e-4)


def test_without_a_warm_start_each_call_begins_elsewhere() -> None:
    own, kept = _matrices(2, 10), [{}, {}]
    first, second = (reduced(PowerSGD(1, False), own, kept)[0][0] for _ in "ab")
    assert np.abs(first - second).max() > 1e-2
