# SPDX-License-Identifier: Apache-2.0
"""A program's results do not depend on the number of processes that build it.

Two processes of two replicas each build all steps of tests/between/programs.py; each
result is compared with that of one process that builds all four replicas.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import replicator
from tests import helpers
from tests.between import processes, programs

# Sums of floats have another order between processes than within one.
_CLOSE = ("compressed", "factors", "gradients", "training")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each process's results, by the names of the steps."""
    folder = tmp_path_factory.mktemp("between")
    processes.run("all_steps", [2, 2], str(folder))
    return [pickle.loads((folder / str(k)).read_bytes()) for k in (0, 1)]


def _leaves(value: Any) -> Iterator[np.ndarray]:
    """Yields the arrays of a nest, those of a PerReplica one by one."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield np.asarray(value)


def _joined(parts: list[Any]) -> Any:
    """Returns all processes' results as from one process: PerReplicas of all."""
    first = parts[0]
    if isinstance(first, replicator.PerReplica):
        return [value for part in parts for value in part]
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return [_joined(list(column)) for column in zip(*parts, strict=True)]
    for part in parts:  # equal everywhere: a variable's value, for example
        np.testing.assert_array_equal(part, first)
    return first


@pytest.mark.parametrize("name", programs.STEPS)
def test_as_one_process(found: list[dict[str, Any]], name: str) -> None:
    repl = helpers.make(programs.REPLICAS, variables="mirrored")
    expected = [*_leaves(programs.STEPS[name](repl))]
    computed = [*_leaves(_joined([results[name] for results in found]))]
    assert len(expected) == len(computed) > 0
    for one, other in zip(expected, computed, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if name in _CLOSE:
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-5)
        else:
            np.testing.assert_array_equal(other, one)


def test_processes_hold_the_same_bits(found: list[dict[str, Any]]) -> None:
    losses, weights = zip(*(results["training"] for results in found), strict=True)
    for one, other in zip(_leaves(losses[0]), _leaves(losses[1]), strict=True):
        assert one.tobytes() == other.tobytes()
    for one, other in zip(*weights, strict=True):
        assert one.tobytes() == other.tobytes()
