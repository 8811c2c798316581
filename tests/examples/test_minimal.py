# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/minimal learn, and compute what one device computes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.examples import programs

pytestmark = pytest.mark.slow


def _numbers(name: str, replicas: int) -> np.ndarray:
    """Runs a program; returns the numbers of its lines, those without them left out."""
    devices = [f"CPU:{k}" for k in range(replicas)]
    printed = programs.call_well(f"minimal/{name}", *devices)
    lines = [re.findall(r"\d+\.\d{3,}", line) for line in printed.splitlines()]
    return np.array([[*map(float, numbers)] for numbers in lines if numbers])


@pytest.mark.gate
def test_a_step_of_ones_own_is_that_of_one_device() -> None:
    on_one, on_three = _numbers("step", 1), _numbers("step", 3)
    assert on_one.shape == (5, 2)
    # A rounding error may change an image's class.
    np.testing.assert_allclose(on_three, on_one, rtol=1e-3, atol=0.004)
    assert on_three[-1, 1] >= 0.95


def test_fit_is_that_of_one_device() -> None:
    (on_one,), (on_two,) = (_numbers("fit", n)[-1:] for n in (1, 2))
    # Rounding errors grow while a network with batch normalization is trained.
    np.testing.assert_allclose(on_two, on_one, rtol=0.05)
    assert on_two[1] >= 0.92


def test_a_gan_begins_as_on_one_device_and_draws_digits() -> None:
    on_one, on_two = _numbers("gan", 1), _numbers("gan", 2)
    np.testing.assert_allclose(on_two[:2], on_one[:2], rtol=1e-3)  # of 10 steps
    assert on_two[-1, 2] < 0.65 * on_two[0, 2]


def test_contrastive_learning_begins_as_on_one_device_and_finds_images() -> None:
    on_one, on_three = _numbers("contrastive", 1), _numbers("contrastive", 3)
    np.testing.assert_allclose(on_three[:2], on_one[:2], rtol=1e-3, atol=0.004)
    assert on_three[-1, 1] > 6 * on_three[0, 1]


@pytest.mark.gate
def test_a_pipeline_is_that_of_one_device() -> None:
    on_one, on_three = _numbers("pipeline", 1), _numbers("pipeline", 3)
    assert on_one.shape == (10, 2)
    np.testing.assert_allclose(on_three, on_one, rtol=1e-3, atol=0.004)
    assert on_three[-1, 1] >= 0.96
