# SPDX-License-Identifier: Apache-2.0
"""A program's results do not depend on the number of processes that build it.

Two processes of two replicas each run the programs of tests/programs, and the longer
ones of programs.py. Up to eight processes train.
"""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers
from tests.between import processes, programs
from tests.programs import catalogue, runner
from tests.programs import program as p

_ABLE = [
    program.first or program
    for program in catalogue.ALL
    if programs.REPLICAS in program.replicas and p.ONE_PROCESS not in program.tags
]
_WAITING = catalogue.PROGRAMS["function_whose_root_needs_nothing"].first
# Each program takes two processes as long as one.
_OF_GATE = [own for n, own in enumerate(_ABLE) if n % 4 == 0 or own is _WAITING]
_OTHERS = [program for program in _ABLE if program not in _OF_GATE]
_TRAINED = [
    catalogue.PROGRAMS[name]
    for name in ("conv_trained_by_momentum", "compressed_by_ef(powersgd(rank=1))")
]
_LIMIT = 900  # seconds; eight processes start at once


def _outcomes(
    name: str, cpus: Sequence[int], folder: pathlib.Path, *arguments: str
) -> list[dict[str, Any]]:
    """Returns each process's results, by the names of the programs."""
    processes.run(name, cpus, str(folder), *arguments, limit=_LIMIT)
    return [pickle.loads((folder / str(k)).read_bytes()) for k in range(len(cpus))]


def _joined(parts: list[Any]) -> Any:
    """Returns all processes' results as from one process: PerReplicas of all."""
    first = parts[0]
    if isinstance(first, replicator.PerReplica):
        return replicator.PerReplica(*[value for part in parts for value in part])
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return [_joined(list(column)) for column in zip(*parts, strict=True)]
    for part in parts:  # equal everywhere: a variable's value, for example
        np.testing.assert_array_equal(part, first)
    return first


def _check(
    chosen: Sequence[p.Program], cpus: Sequence[int], folder: pathlib.Path
) -> None:
    names = [program.name for program in chosen]
    found = _outcomes("of_catalogue", cpus, folder, *names)
    way = f"{len(cpus)} processes"
    problems = []
    for program in chosen:
        results, components = zip(*(own[program.name] for own in found), strict=True)
        try:
            runner.compare(program, _joined([*results]), sum(cpus), way)
            runner.check_equal(
                program,
                way,
                {k: sum((own[k] for own in components), []) for k in components[0]},
            )
        except pytest.fail.Exception as problem:
            problems.append(str(problem))
    assert not problems, problems[0]


def test_two_processes_compute_what_one_does(tmp_path: pathlib.Path) -> None:
    _check(_OF_GATE, [2, 2], tmp_path)


@pytest.mark.slow
def test_two_processes_compute_all_that_one_does(tmp_path: pathlib.Path) -> None:
    _check(_OTHERS, [2, 2], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("cpus", [[1] * 8, [2] * 4], ids=["8x1", "4x2"])
def test_eight_replicas_train(cpus: list[int], tmp_path: pathlib.Path) -> None:
    _check(_TRAINED[:1], cpus, tmp_path)


def test_longer_programs(tmp_path: pathlib.Path) -> None:
    found = _outcomes("all_runs", [2, 2], tmp_path)
    for name, run in programs.RUNS.items():
        expected = run(helpers.make(programs.REPLICAS, variables="mirrored"))
        computed = _joined([results[name] for results in found])
        pairs = zip(
            *(tf.nest.flatten(value) for value in (expected, computed)), strict=True
        )
        for one, other in pairs:
            one, other = np.asarray(one), np.asarray(other)
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            # Sums of floats have another order between processes than within one.
            close = 1e-5 if name == "compressed" else 0.0
            np.testing.assert_allclose(other, one, rtol=0, atol=close, err_msg=name)
