# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for programs on which all replicas agree.

A program is simulated while it is drawn, so that each statement fits the available
values. Messages are received in the block that sends them; the order of the statements
is one in which all communication can happen.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import assume
from hypothesis import strategies as st

from tests import repeatable
from tests.spmd import calls, regions, simulator
from tests.spmd import program as p

T = TypeVar("T")

_MOST = (5, 3, 2, 2)  # statements in a block, by its depth
_DEEPEST = len(_MOST) - 1
_LARGE = 24  # elements of enlarged values
_PEAK = 1e6  # of all numbers, so that rounding stays far below the values


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of program to draw.

    Attributes:
        differentiate: As in `Program`.
        mode: As in `Program`.
        replicas: The possible numbers of replicas.
        budget: The total cost of the statements, in build time.
        shared: Whether all replicas may call one tf.function.
        least: The minimum number of statements, as Hypothesis prefers few.
    """

    differentiate: str = ""
    mode: str = "eager"
    replicas: tuple[int, ...] = (2, 3, 1, 4)
    budget: int = 12
    shared: bool = True
    least: int = 4


@st.composite
def programs(draw: Any, kind: Kind = Kind()) -> p.Program:
    """Draws a valid program."""
    maker = Maker(draw, draw(st.sampled_from(kind.replicas)), kind)
    scope: simulator.Scope = {}
    inputs = []
    for _ in range(maker.integer(1, 3)):
        inputs.append(maker.data(scope, 0))
        simulator.execute(inputs[-1], scope, maker.world)
    body = p.Block(tuple(maker.statements(scope, 0)))
    assume(maker.world.peak < _PEAK)
    assume(sum(1 for _ in p.walk(body)) >= kind.least)
    assume(not kind.differentiate or any(x.dtype != "int32" for x in inputs))
    return p.Program(
        maker.world.num_replicas,
        tuple(inputs),
        body,
        kind.differentiate,
        mode=kind.mode,
    )


class Maker:
    """Draws statements, and simulates each."""

    def __init__(self, draw: Any, num_replicas: int, kind: Kind) -> None:
        self.draw = draw
        self.kind = kind
        self.world = simulator.World(num_replicas)
        self.budget = kind.budget
        self.smooth = bool(kind.differentiate)
        self._names = (f"v{n}" for n in itertools.count())

    def integer(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def choice(self, among: Sequence[T]) -> T:
        return repeatable.choice(self.draw, among)

    def maybe(self) -> bool:
        return self.draw(st.booleans())

    def fresh(self) -> str:
        return next(self._names)

    def statements(self, scope: simulator.Scope, depth: int) -> list[p.Statement]:
        """Draws the statements of a block, which update the scope."""
        result: list[p.Statement] = []
        waiting: list[calls.Message] = []

        def add(statement: p.Statement) -> None:
            simulator.execute(statement, scope, self.world)
            result.append(statement)
            lacking = [
                x for x in p.targets(statement) if not simulator.present(scope[x])
            ]
            if lacking and self.maybe():
                add(self._local(scope, lacking[0]))

        most = _MOST[depth]
        for _ in range(min(most, self.integer(1, most + 3))):  # rather many than few
            draw, cost = self.choice(self._affordable(scope, depth, waiting))
            self.budget -= cost
            # If nothing fits, some local arithmetic always does.
            add(draw() or self._local(scope))
        while waiting:
            add(calls.receive(self, scope, waiting))
        return result

    def _affordable(
        self, scope: simulator.Scope, depth: int, waiting: list[calls.Message]
    ) -> list[tuple[Callable[[], p.Statement | None], int]]:
        """Returns possible next statements with their costs; frequent ones repeat."""
        kinds: list[tuple[Callable[[], p.Statement | None], int]] = []
        kinds += [(lambda: calls.collective(self, scope), 1)] * 5
        kinds += [(lambda: self._local(scope), 1)] * 2
        kinds += [(lambda: p.Barrier(calls.groups(self)), 1)]
        if self.world.num_replicas > 1:
            kinds += [(lambda: calls.send(self, scope, waiting, depth), 1)] * 2
        if waiting:
            kinds += [(lambda: calls.receive(self, scope, waiting), 1)] * 2
        if not self.smooth:  # a differentiated value depends on the inputs
            kinds += [(lambda: self.data(scope, depth), 1)]
        for draw, cost in regions.COSTS.items() if depth < _DEEPEST else ():
            if cost + depth <= self.budget:
                kinds += [(lambda draw=draw: draw(self, scope, depth), cost)]
        return kinds

    def data(self, scope: simulator.Scope, depth: int) -> p.Data:
        """Draws values that differ by replica."""
        shape = tuple(self.draw(st.lists(st.integers(1, 3), max_size=2)))
        shapes = [shape for _ in self.world.replica_ids]
        if shape and self.integer(0, 3) == 3:
            shapes = [(self.integer(0, 3), *shape[1:]) for _ in shapes]
        return p.Data(
            self.fresh(),
            self.choice(["float32", "float64", "int32"]),
            tuple(shapes),
            seed=self.integer(0, 9),
            known=self.integer(0, 3) < 3,
        )

    def _local(self, scope: simulator.Scope, source: str | None = None) -> p.Local:
        """Draws some arithmetic, of one register or with another like it."""
        source = source or self.choice(list(scope))
        values = scope[source]
        if not simulator.present(values):
            return self._completed(scope, source)
        function = self.choice(["times_own", "mix", "multiply", "twice", "total"])
        if function in ("twice", "total"):
            suits = all(v.ndim and v.size <= _LARGE for v in values)
            function = function if suits else "times_own"
        if function in ("mix", "multiply"):
            alike = [
                x for x in scope if simulator.types(scope[x]) == simulator.types(values)
            ]
            return p.Local(self.fresh(), function, (source, self.choice(alike)))
        return p.Local(self.fresh(), function, (source,))

    def _completed(self, scope: simulator.Scope, source: str) -> p.Local:
        """Draws a substitute for missing values, preferably of the same shape."""
        types = [x for x in simulator.types(scope[source]) if x is not None]
        others = [
            x
            for x, v in scope.items()
            if simulator.present(v) and v[0].dtype == types[0][0]
        ]
        alike = [x for x in others if set(simulator.types(scope[x])) == {types[0]}]
        if not others:
            return p.Local(self.fresh(), "times_own", (source,))
        return p.Local(self.fresh(), "first", (source, self.choice(alike or others)))
