# SPDX-License-Identifier: Apache-2.0
"""Draws the control flow of a random program: blocks, and the statements that run them.

The inputs and results of a block exist on all replicas. In a differentiated program,
the result of each block depends on all communication inside, so that every replica
takes part in the gradients of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.spmd import program as p
from tests.spmd import simulator

_SMALL = 12  # elements of the result for each row

Values = simulator.Values
Scope = simulator.Scope


def choose(by: Any, scope: Scope, depth: int) -> p.Choose | None:
    """Draws a conditional."""
    like = _templates(by, scope)
    if not like:
        return None
    count = by.choice([2, 2, 3])
    number = _number(by, scope, count)
    branches = [
        _block(by, dict(scope), depth + 1, like, bounded=False) for _ in range(count)
    ]
    names = tuple(by.fresh() for _ in like)
    return p.Choose(names, number, tuple(branches), switch=count > 2)


def loop(by: Any, scope: Scope, depth: int) -> p.Loop | None:
    """Draws a while loop."""
    initial = _templates(by, scope)
    if not initial:
        return None
    number = _number(by, scope, 4)
    arguments, values = _renamed(by, scope, initial)
    body = _block(by, {**scope, **values}, depth + 1, arguments)
    names = tuple(by.fresh() for _ in initial)
    return p.Loop(names, number, tuple(initial), arguments, body)


def call(by: Any, scope: Scope, depth: int) -> p.Call | None:
    """Draws a nested tf.function."""
    initial = _templates(by, scope)
    if not initial:
        return None
    arguments, values = _renamed(by, scope, initial)
    body = _block(by, values, depth + 1, arguments)
    names = tuple(by.fresh() for _ in initial)
    times, shared = by.choice([1, 2]), by.kind.shared and by.maybe()
    return p.Call(names, tuple(initial), arguments, body, times, shared)


def map_rows(by: Any, scope: Scope, depth: int) -> p.Map | None:
    """Draws a tf.map_fn."""
    source = _rows(by, scope)
    if source is None:
        return None
    row = by.fresh()
    inner = {**scope, row: simulator.rows_of(scope[source])[0]}
    small = {x: v for x, v in inner.items() if x == row or _is_small(v)}
    [like] = _templates(by, small, most=1)
    body = _block(by, inner, depth + 1, [like], bounded=False)
    dtype = str(inner[body.yields[0]][0].dtype)
    return p.Map(by.fresh(), dtype, source, row, body)


def scan_rows(by: Any, scope: Scope, depth: int) -> p.Scan | None:
    """Draws a tf.scan, or a tf.foldl."""
    source = _rows(by, scope)
    like = _templates(by, scope, most=1)
    if source is None or not like:
        return None
    row, state = by.fresh(), by.fresh()
    inner = {**scope, row: simulator.rows_of(scope[source])[0]}
    inner[state] = scope[like[0]]
    body = _block(by, inner, depth + 1, [state])
    return p.Scan(by.fresh(), source, row, like[0], state, body, fold=by.maybe())


# Each takes the source of choices, the registers and the depth; None if none fits.
COSTS: dict[Callable[[Any, Scope, int], p.Statement | None], int] = {
    choose: 4,
    loop: 4,
    call: 2,
    map_rows: 4,
    scan_rows: 4,
}


def _number(by: Any, scope: Scope, below: int) -> p.Number:
    """Draws a number on which the replicas agree, in part from their values."""
    integers = [
        x
        for x, v in scope.items()
        if simulator.present(v) and not simulator.is_float(v)
    ]
    source = by.choice(integers) if integers and by.maybe() else None
    return p.Number(by.integer(0, below - 1), below, source)


def _rows(by: Any, scope: Scope) -> str | None:
    """Draws a register with the same number of rows on all replicas."""

    def suits(values: Values) -> bool:
        counts = {v.shape[0] if v is not None and v.ndim else 0 for v in values}
        floats = simulator.is_float(values) or not by.smooth
        return len(counts) == 1 and counts <= {1, 2, 3} and floats

    names = [name for name in reversed(scope) if suits(scope[name])]
    return by.choice(names) if names else None


def _templates(by: Any, scope: Scope, most: int = 2) -> list[str]:
    """Draws registers that all replicas have, a floating one first if needed."""
    everywhere = [x for x in reversed(scope) if simulator.present(scope[x])]
    first = [x for x in everywhere if simulator.is_float(scope[x]) or not by.smooth]
    if not first:
        return []
    others = [by.choice(everywhere) for _ in range(by.integer(0, most - 1))]
    return [by.choice(first), *others]


def _renamed(by: Any, scope: Scope, names: Sequence[str]) -> tuple[p.Names, Scope]:
    """Returns new names for registers, and a scope with their values."""
    arguments = tuple(by.fresh() for _ in names)
    values = {a: scope[name] for a, name in zip(arguments, names, strict=True)}
    return arguments, values


def _block(
    by: Any, scope: Scope, depth: int, results: Sequence[str], bounded: bool = True
) -> p.Block:
    """Draws a block whose results are like registers of the scope.

    Args:
        by: The source of choices.
        scope: The registers visible inside; modified.
        depth: The depth of the block.
        results: Each result has the types of one of these.
        bounded: Whether to keep the results small, as the block is repeated.
    """
    like = [simulator.types(scope[name]) for name in results]
    body = by.statements(scope, depth)
    yields = [_alike(by, scope, types, body) for types in like]
    body += _finish(by, scope, body, yields, bounded)
    return p.Block(tuple(body), tuple(yields))


def _alike(by: Any, scope: Scope, types: Any, made: Sequence[p.Statement]) -> str:
    """Draws a register of these types, mostly one that the statements assign."""
    suiting = [x for x in reversed(scope) if simulator.types(scope[x]) == types]
    names = {name for statement in made for name in p.targets(statement)}
    if names.intersection(suiting) and by.integer(0, 3) < 3:
        suiting = [x for x in suiting if x in names]
    return by.choice(suiting)


def _finish(
    by: Any,
    scope: Scope,
    made: Sequence[p.Statement],
    yields: list[str],
    bounded: bool,
) -> list[p.Statement]:
    """Returns final statements of a block, and replaces its results by theirs."""
    added: list[p.Statement] = []

    def apply(k: int, function: str, *others: str) -> None:
        local = p.Local(by.fresh(), function, (yields[k], *others))
        simulator.execute(local, scope, by.world)
        added.append(local)
        yields[k] = local.target

    if by.smooth:
        [first, *_] = [k for k, y in enumerate(yields) if simulator.is_float(scope[y])]
        names = [name for statement in made for name in p.targets(statement)]
        apply(first, "absorb", *(x for x in names if simulator.is_float(scope[x])))
        apply(first, "linked")
    for k in range(len(yields)) if bounded else ():
        apply(k, "squash")
    return added


def _is_small(values: Values) -> bool:
    return all(v is not None and v.size <= _SMALL for v in values)
