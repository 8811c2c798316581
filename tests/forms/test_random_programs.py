# SPDX-License-Identifier: Apache-2.0
"""Random programs of whole batches compute on replicas what one device computes.

`python -m tests.forms.programs SEED` runs one; with --small it leaves out what does not
matter for a fault.
"""

from __future__ import annotations

import collections

import pytest

from tests.forms.programs import doors, rarely, running, sessions
from tests.forms.programs.random_programs import NEWER, ROOMS, ROWS, Program

PART = 25


def _firsts(count: int) -> list[int]:
    """Returns the first seeds of parts: of older programs, and of newer ones."""
    return [*range(0, count, PART), *range(NEWER, NEWER + count, PART)]


def _faults(
    seed: int, door: running.Door, *counts: int, of: type = Program
) -> list[str]:
    kind, details = running.outcome(of(seed), door, counts)
    # TensorFlow takes no third derivatives of some loops.
    return (
        [] if kind in ("equal", running.NOT_BUILT) else [f"{seed}: {kind}: {details}"]
    )


# 9: an op is built before its twin. 3049: tensors of unknown rank. 4876: an axis of
# unknown length broadcasts.
@pytest.mark.parametrize("seed", [*range(NEWER, NEWER + 16), 9, 3049, 4876])
def test_a_random_program(seed):
    assert not _faults(seed, doors.engine, 2 + seed % 2)


# 569, 641: rows whose places follow from how many the replicas before have.
@pytest.mark.parametrize("seed", [NEWER, 569, 641])
def test_a_random_program_of_copies(seed):
    assert not _faults(seed, doors.copies, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("first", _firsts(1000))
def test_random_programs(first):
    seeds = range(first, first + PART)
    faults = [fault for seed in seeds for fault in _faults(seed, doors.engine, 2, 3)]
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("first", _firsts(200))
def test_random_programs_of_sharded_variables(first):
    seeds = range(first, first + PART)
    faults = [fault for seed in seeds for fault in _faults(seed, doors.sharded, 3)]
    assert not faults, "\n".join(faults)


# 171: a shape is inferred of no rows, in a graph, where == compares identities.
# 904: copies call a Python function in a graph that called none before.
@pytest.mark.parametrize("seed", [*(NEWER + k for k in (0, 1, 4, 5, 8)), 171, 904])
def test_a_random_graph(seed):
    door = sessions.of_setting(seed)
    assert not _faults(seed, door, 2 + seed % 2, of=sessions.GraphProgram)


@pytest.mark.slow
@pytest.mark.parametrize("first", _firsts(150))
def test_random_graphs(first):
    faults = []
    for seed in range(first, first + PART):
        door, count = sessions.of_setting(seed), 1 + seed % 3
        faults += _faults(seed, door, count, of=sessions.GraphProgram)
    assert not faults, "\n".join(faults)


def test_all_kinds_of_computations_appear():
    programs = [Program(seed) for seed in range(NEWER, NEWER + 300)]
    found = collections.Counter(one for p in programs for one in p.makers)
    everything = {one for room in (*ROOMS, rarely) for one in room.MAKERS}
    everything |= set(ROWS)
    assert {one.__name__ for one in everything - set(found)} == set()
