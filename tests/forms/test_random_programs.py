# SPDX-License-Identifier: Apache-2.0
"""Random programs of whole batches compute on replicas what one device computes.

`python -m tests.forms.programs SEED` runs one; with --small it leaves out what does not
matter for a fault.
"""

from __future__ import annotations

import pytest

from tests.forms.programs import doors, running
from tests.forms.programs.random_programs import Program

COUNT, PART = 2000, 25


def _faults(seed: int, counts: tuple[int, ...]) -> list[str]:
    program = Program(seed)
    expected = running.run(program)
    faults = []
    for num_replicas in counts:
        try:
            fault = running.problem(program, expected, doors.engine, num_replicas)
        except Exception as error:  # the other programs of a part run, too
            fault = running.cause(error)
        if fault:
            faults.append(f"seed {seed}, {num_replicas} replicas: {fault}")
    return faults


# 9: an op is built before the one that computes the same. 3049: tensors of unknown rank.
@pytest.mark.parametrize("seed", [*range(COUNT, COUNT + 16), 9, 3049])
def test_a_random_program(seed):
    assert not _faults(seed, (2 + seed % 2,))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, COUNT, PART))
def test_random_programs(first):
    seeds = range(first, first + PART)
    faults = [fault for seed in seeds for fault in _faults(seed, (2, 3))]
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, PART))
def test_random_programs_of_sharded_variables(first):
    faults = []
    for seed in range(first, first + PART):
        program = Program(seed)
        door = doors.sharded
        fault = running.problem(program, running.run(program), door, 3)
        faults += [f"seed {seed}: {fault}"] if fault else []
    assert not faults, "\n".join(faults)
