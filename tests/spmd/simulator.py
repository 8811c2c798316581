# SPDX-License-Identifier: Apache-2.0
"""Runs a program in NumPy, statement by statement for all replicas at once.

The semantics come from the definitions of the primitives, not from the library.
Gradients are difference quotients of the losses.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tests.spmd import definitions
from tests.spmd import program as p

Values = list[np.ndarray | None]  # one per replica
Scope = dict[str, Values]
Nudge = Mapping[tuple[str, int], np.ndarray]


@dataclasses.dataclass
class World:
    """The shared state of a run's statements.

    Attributes:
        num_replicas: The number of replicas.
        wide: Whether all floats are computed in float64.
        mail: Messages sent and not yet received, by (sender, receiver, tag).
        peak: The largest number so far, which bounds the precision of results.
    """

    num_replicas: int
    wide: bool = False
    mail: dict[tuple[int, int, int], collections.deque[np.ndarray]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.deque)
    )
    peak: float = 1.0

    @property
    def replica_ids(self) -> range:
        """The replicas."""
        return range(self.num_replicas)


def run(program: p.Program, wide: bool = False, nudge: Nudge | None = None) -> Scope:
    """Returns all registers at the end, and the losses under the name "loss".

    Args:
        program: The program.
        wide: Whether all floats are computed in float64.
        nudge: Added to the inputs, by (register, replica).
    """
    return observe(program, World(program.num_replicas, wide), nudge)


def observe(program: p.Program, world: World, nudge: Nudge | None = None) -> Scope:
    """As `run`, in a world that the caller inspects afterwards."""
    scope: Scope = {}
    for data in program.inputs:
        execute(data, scope, world)
    for (name, r), change in (nudge or {}).items():
        scope[name][r] = scope[name][r] + change
    run_block(program.body, scope, world)
    scope["loss"] = [loss(program, scope, r) for r in world.replica_ids]
    return scope


def loss(program: p.Program, scope: Scope, replica_id: int) -> np.ndarray:
    """A sum of all floating registers of a replica, each with a weight of its own."""
    total = 0.0
    for k, name in enumerate(program.results):
        value = scope[name][replica_id]
        if value is not None and value.dtype != np.int32:
            total += (k + 1 + replica_id) / 8 * value.astype(np.float64).sum()
    return np.float64(total)


def slopes(
    program: p.Program, directions: Sequence[Nudge], step: float = 1e-5
) -> list[float | None]:
    """Returns the derivatives of the sum of all replicas' losses, along directions.

    None where the one-sided derivatives differ.
    """

    def total(direction: Nudge, size: float) -> float:
        nudge = {where: size * change for where, change in direction.items()}
        return float(sum(run(program, True, nudge)["loss"]))

    here = total({}, 0.0)
    result: list[float | None] = []
    for direction in directions:
        ahead, behind = total(direction, step), total(direction, -step)
        right, left = (ahead - here) / step, (here - behind) / step
        smooth = abs(right - left) < 1e-2 * max(1.0, abs(right), abs(left))
        result.append((ahead - behind) / (2 * step) if smooth else None)
    return result


def run_block(block: p.Block, scope: Scope, world: World) -> list[Values]:
    """Executes the statements of a block; returns its results."""
    for statement in block.statements:
        execute(statement, scope, world)
    return [scope[name] for name in block.yields]


def execute(statement: p.Statement, scope: Scope, world: World) -> None:
    """Executes one statement, which adds registers to the scope."""
    results = _execute(statement, scope, world)
    for name, values in zip(p.targets(statement), results, strict=True):
        scope[name] = values
        for value in values:
            if value is not None and value.size:
                world.peak = max(world.peak, float(np.abs(value).max()))


@functools.singledispatch
def _execute(statement: Any, scope: Scope, world: World) -> list[Values]:
    raise TypeError(statement)


@_execute.register
def _(statement: p.Data, scope: Scope, world: World) -> list[Values]:
    values = [statement.value(r) for r in world.replica_ids]
    widen = world.wide and statement.dtype != "int32"
    return [[value.astype("float64") if widen else value for value in values]]


@_execute.register
def _(statement: p.Local, scope: Scope, world: World) -> list[Values]:
    sources = [scope[name] for name in statement.sources]
    function = LOCAL[statement.function]
    return [
        [function(r, *(source[r] for source in sources)) for r in world.replica_ids]
    ]


@_execute.register
def _(statement: p.Collective, scope: Scope, world: World) -> list[Values]:
    received: Values = [None] * world.num_replicas
    for group in statement.members(world.num_replicas):
        options = dict(statement.options)
        if "root" in options:
            options["root"] = group.index(options["root"])
        if "pairs" in options:
            options["pairs"] = [tuple(map(group.index, x)) for x in options["pairs"]]
        for name in {"weight", "splits"} & options.keys():
            options[name] = [options[name][r] for r in group]
        values = [scope[statement.source][r] for r in group]
        results = getattr(definitions, statement.primitive)(values, **options)
        for r, result in zip(group, results, strict=True):
            received[r] = result
    if not statement.owner:
        return [received]
    # The ids follow the extrema, the same on all replicas.
    ids = dataclasses.replace(statement, source="ids", owner=None)
    options = {**dict(statement.options), "op": "max"}
    ids = dataclasses.replace(ids, options=tuple(options.items()))
    held: Values = [None] * world.num_replicas
    for group in statement.members(world.num_replicas):
        values = [scope[statement.source][r] for r in group]
        places = definitions.places(values, statement.option("op"))
        for r in group:
            held[r] = np.asarray(np.take(group, places), np.int32)
    return [received, *_execute(ids, {"ids": held}, world)]


@_execute.register
def _(statement: p.Barrier, scope: Scope, world: World) -> list[Values]:
    return []


@_execute.register
def _(statement: p.Send, scope: Scope, world: World) -> list[Values]:
    value = scope[statement.source][statement.sender]
    assert value is not None, "a program sends what there is"
    world.mail[statement.sender, statement.receiver, statement.tag].append(value)
    return []


@_execute.register
def _(statement: p.Recv, scope: Scope, world: World) -> list[Values]:
    received: Values = [None] * world.num_replicas
    mail = world.mail[statement.sender, statement.receiver, statement.tag]
    received[statement.receiver] = mail.popleft()
    return [received]


def number(wanted: p.Number, scope: Scope) -> int:
    """Returns a number on which the replicas agree."""
    total = wanted.constant
    if wanted.source is not None:
        total += max(int(value.sum()) for value in scope[wanted.source])
    return total % wanted.below


@_execute.register
def _(statement: p.Choose, scope: Scope, world: World) -> list[Values]:
    branch = statement.branches[number(statement.number, scope)]
    return run_block(branch, dict(scope), world)


@_execute.register
def _(statement: p.Loop, scope: Scope, world: World) -> list[Values]:
    carried = [scope[name] for name in statement.initial]
    for _ in range(number(statement.number, scope)):
        inner = {**scope, **dict(zip(statement.arguments, carried, strict=True))}
        carried = run_block(statement.body, inner, world)
    return carried


@_execute.register
def _(statement: p.Map, scope: Scope, world: World) -> list[Values]:
    rows = [
        run_block(statement.body, {**scope, statement.row: row}, world)[0]
        for row in rows_of(scope[statement.source])
    ]
    return [[np.stack(row) for row in zip(*rows, strict=True)]]


@_execute.register
def _(statement: p.Scan, scope: Scope, world: World) -> list[Values]:
    state, states = scope[statement.initial], []
    for row in rows_of(scope[statement.source]):
        inner = {**scope, statement.row: row, statement.state: state}
        [state] = run_block(statement.body, inner, world)
        states.append(state)
    if statement.fold:
        return [state]
    return [[np.stack(row) for row in zip(*states, strict=True)]]


def rows_of(values: Values) -> list[Values]:
    """Returns the n-th rows of all replicas, for each n."""
    return [list(row) for row in zip(*values, strict=True)]


@_execute.register
def _(statement: p.Call, scope: Scope, world: World) -> list[Values]:
    carried = [scope[name] for name in statement.initial]
    for _ in range(statement.times):
        inner = dict(zip(statement.arguments, carried, strict=True))
        carried = run_block(statement.body, inner, world)
    return carried


def types(values: Values) -> list[Any]:
    """Returns what must match for one register to replace another."""
    return [None if v is None else (v.dtype, v.shape) for v in values]


def present(values: Sequence[np.ndarray | None]) -> bool:
    """Whether all replicas have a value."""
    return all(v is not None for v in values)


def is_float(values: Sequence[np.ndarray | None]) -> bool:
    """Whether a register holds floating numbers."""
    return any(v is not None and v.dtype != np.int32 for v in values)


# --- Local arithmetic ----------------------------------------------------------------


def _where_present(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of arrays return None where an array is missing."""

    def local(replica_id: int, *values: np.ndarray | None) -> np.ndarray | None:
        if any(value is None for value in values):
            return None
        result = function(replica_id, *values)
        return np.asarray(result).astype(values[0].dtype)

    return local


def _is_int(value: np.ndarray) -> bool:
    return value.dtype == np.int32


def _absorb(replica_id: int, value: np.ndarray, *others: np.ndarray) -> np.ndarray:
    for other in others:
        if other is not None:
            value = value + np.asarray(0.125 * other.sum()).astype(value.dtype)
    return value


LOCAL: dict[str, Callable[..., Any]] = {
    "mix": _where_present(
        lambda r, a, b: (a + b) % 97 if _is_int(a) else (a + b) / 2,
    ),
    "multiply": _where_present(lambda r, a, b: a * b % 97 if _is_int(a) else a * b),
    "times_own": _where_present(
        lambda r, a: a * (r + 1) % 97 if _is_int(a) else a * (r + 1) / 2
    ),
    "squash": _where_present(lambda r, a: a % 5 if _is_int(a) else np.tanh(a)),
    "twice": _where_present(lambda r, a: np.concatenate([a, a])),
    "total": _where_present(lambda r, a: a.sum(0)),
    "linked": lambda r, a: a,
    "first": lambda r, *given: next((x for x in given if x is not None), None),
    "absorb": _absorb,
}
