# SPDX-License-Identifier: Apache-2.0
"""The laws of rules, where sizes of static shapes are TensorFlow 1's Dimensions.

An unknown one is neither None nor unequal to a number.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator

import pytest
import tensorflow as tf

from tests.forms import laws

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def _dimensions() -> Iterator[None]:
    v1.disable_v2_tensorshape()
    yield
    v1.enable_v2_tensorshape()


# Programs of TensorFlow 1 make these ops most often.
@pytest.mark.parametrize("room", ["shapes", "reductions", "slices"])
def test_law(room: str) -> None:
    _check(room)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["elementwise", "lookups", "rows", "normalization"])
def test_law_of_others(room: str) -> None:
    _check(room)


def _check(room: str) -> None:
    module = importlib.import_module(f"tests.forms.rules.test_{room}")
    samples = [*module.SAMPLES, *getattr(module, "OTHERS", ())]
    law = laws.Law([dataclasses.replace(s, grads=False) for s in samples], 2)
    for rows in (5, 1):
        law.check(rows)
