# SPDX-License-Identifier: Apache-2.0
"""The ways in which each program of the catalogue runs, and which of them runs where.

| where | the ways |
|---|---|
| `make test` | two rows of the table, in turn over the programs; two processes |
| `make test-long` | all rows; all in two processes; some in four and eight |
| `make test-plain` | the two rows of `make test`, without replicator/_tf/fast |
| `make test-hosts` | those, on the devices of two servers |
| `make test-v1` | all rows in sessions, after disable_v2_behavior() |

A row sets all options, so `make test-options` leaves the catalogue out.
"""

from __future__ import annotations

import ast
import dataclasses
from typing import Any

import pytest

import replicator
from replicator import errors
from tests import helpers
from tests.programs import program as p

# Any two values of any two columns meet in a row, but that sessions make one step each.
_TABLE = """\
mode     replicas variables build algorithm fusion factors kernels check together
eager    1        mirrored  clone None      False  True    False   False True
session  3        auto      trace None      True   False   True    True  False
function 2        sharded   clone ring      True   True    True    False False
function 4        sharded   trace shuffled  False  False   False   True  True
eager    4        mirrored  clone hub       True   False   True    True  False
session  3        auto      clone tree      False  True    False   False False
eager    2        mirrored  trace tree      True   True    False   True  True
function 1        auto      trace hub       False  False   True    False True
session  1        sharded   clone shuffled  True   True    True    False False
eager    3        sharded   trace ring      False  False   False   True  True
session  2        auto      trace hub       False  False   False   True  False
session  4        auto      trace ring      True   True    False   False False
function 1        sharded   clone tree      False  False   True    True  False
function 3        mirrored  clone shuffled  False  False   True    True  False
eager    2        auto      trace shuffled  True   True    True    False False
function 4        sharded   clone None      False  True    False   False True
function 3        sharded   trace hub       True   True    False   True  False
session  1        mirrored  clone ring      False  True    True    False False
session  2        sharded   trace None      False  False   True    True  False
function 4        auto      trace tree      False  False   True    False False
"""
_HEAD, *_ROWS = (line.split() for line in _TABLE.splitlines())


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run a program.

    Attributes:
        mode: One of helpers.MODES.
        replicas: The number of replicas.
        together: Whether all steps are made in one call.
        options: Options of Replicator.
    """

    mode: str
    replicas: int
    together: bool
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        values = [self.mode, self.replicas, *dict(self.options).values()]
        return "-".join(map(str, [*values, *["together"] * self.together]))

    def replicator(self) -> replicator.Replicator:
        """Returns a Replicator for this way."""
        return helpers.make(self.replicas, **dict(self.options))

    def refuses(self, program: p.Program) -> tuple[type[Exception], str] | None:
        """Returns the error that a program gets, and a pattern of its message."""
        is_copied = self.replicas > 1 and ("build", "clone") in self.options
        if p.ASKS in program.tags and is_copied:
            return errors.CloneError, "cannot be known: step_fn is called once"
        return None


def _way(row: list[str]) -> Way:
    cells: dict[str, Any] = dict(zip(_HEAD, row, strict=True))
    for name, text in cells.items():
        if text in ("None", "False", "True") or text.isdecimal():
            cells[name] = ast.literal_eval(text)
    mode, replicas, together = (cells.pop(k) for k in ("mode", "replicas", "together"))
    return Way(mode, replicas, together, tuple(cells.items()))


WAYS = [_way(row) for row in _ROWS]


def reference(replicas: int) -> Way:
    """Returns the plainest way, which says what a program computes if nothing does."""
    options = (("variables", "mirrored"), ("build", "trace"), ("algorithm", "hub"))
    return Way("eager", replicas, False, options)


def of(program: p.Program) -> list[Way]:
    """Returns the ways in which a program runs."""
    able = [w for w in WAYS if w.mode != "session" or p.NO_SESSION not in program.tags]
    if p.SHAPES in program.tags:
        able = [dataclasses.replace(w, together=False) for w in able]
    exact = [w for w in able if w.replicas in program.replicas]
    return exact or [dataclasses.replace(w, replicas=program.replicas[0]) for w in able]


def cases(programs: list[p.Program]) -> list[Any]:
    """Returns all programs in all ways; two ways each are of the gate, in turn."""
    found = []
    for number, program in enumerate(programs):
        ways = of(program)
        gate = {number % len(ways), (2 * number + len(ways) // 2) % len(ways)}
        for n, way in enumerate(ways):
            marks = () if n in gate else pytest.mark.slow
            name = f"{program.name}-{way}"
            found.append(pytest.param(program, way, id=name, marks=marks))
    return found
