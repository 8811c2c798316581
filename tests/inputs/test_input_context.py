# SPDX-License-Identifier: Apache-2.0
"""The contents of an InputContext; tests/inputs/test_feeds.py tests its use."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from replicator import ArgumentError, InputContext, InputError


def _context(num_replicas: int) -> InputContext:
    return InputContext(0, num_replicas, 0, num_replicas)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_the_replicas_batches_are_the_global_batch(num_replicas: int) -> None:
    for size in range(1, 4):
        actual = _context(num_replicas).per_replica_batch_size(size * num_replicas)
        assert actual == size and type(actual) is int
    assert _context(num_replicas).per_replica_batch_size(np.int64(num_replicas)) == 1


@pytest.mark.parametrize(
    ("num_replicas", "batch"), [(2, 1), (2, 7), (3, 0), (8, 9), (3, -3), (1, 0)]
)
def test_a_remainder_is_refused_with_sizes_that_do(
    num_replicas: int, batch: int
) -> None:
    ctx = _context(num_replicas)
    with pytest.raises(InputError, match=f"(?s)batch of {batch} .*Fix: ") as caught:
        ctx.per_replica_batch_size(batch)
    numbers = re.findall(r"\d+", str(caught.value).partition("e.g.")[2])
    assert len(numbers) == 2
    for number in map(int, numbers):
        assert ctx.per_replica_batch_size(number) * num_replicas == number


@pytest.mark.parametrize("batch", [None, 8.0, "8", True, 10**30, [8]], ids=repr)
def test_what_is_no_number_of_examples_is_refused(batch: Any) -> None:
    with pytest.raises(InputError, match=r"(?s)cannot have .*Fix: .*positive int"):
        _context(2).per_replica_batch_size(batch)


@pytest.mark.parametrize("value", [-1, 1.0, None, True, "1"], ids=repr)
@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(InputContext)])
def test_bad_fields_are_named(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"(?s)InputContext has {field}=.*Fix: "):
        dataclasses.replace(_context(2), **{field: value})


def test_it_is_a_value() -> None:
    assert _context(2) == _context(2) and len({_context(2), _context(2)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        _context(2).replica_id = 1  # type: ignore[misc]
