# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for programs that write variables."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from tests import repeatable
from tests.writes import program as p
from tests.writes import updates, values, writes

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Kind:
    """The kind of program to draw.

    Attributes:
        verdicts: The verdicts that statements may have.
        mode: One of helpers.MODES.
        replicas: The possible numbers of replicas.
        sharded: Whether one replica may own a variable.
        most: The maximum number of statements.
    """

    verdicts: tuple[str, ...] = (p.RIGHT, p.OPEN, p.WRONG)
    mode: str = "eager"
    replicas: tuple[int, ...] = (2,)
    sharded: tuple[bool, ...] = (False, True)
    most: int = 4


@st.composite
def programs(draw: Any, kind: Kind) -> p.Program:
    """Draws a program."""
    maker = Maker(draw, kind)
    options: dict[str, object] = {"build": "trace", "check": maker.check}
    options["variables"] = "sharded" if maker.sharded else "mirrored"
    return p.Program(
        maker.choice(kind.replicas),
        kind.mode,
        tuple(options.items()),
        maker.variables,
        tuple(maker.statements(kind.most, 0)),
    )


class Maker:
    """Draws variables and statements."""

    def __init__(self, draw: Any, kind: Kind) -> None:
        self._draw = draw
        self._kind = kind
        self._numbers = itertools.count()
        self.mode = kind.mode
        self.check = self.integer(0, 3) == 3
        self.sharded = self.choice(kind.sharded)
        self.variables = tuple(
            self._variable(n, dtype)
            for n, dtype in enumerate(
                ["float32", *self._some(["float32", "int32", "int32", "bool"])]
            )
        )

    def integer(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, most))

    def choice(self, among: Sequence[T]) -> T:
        return repeatable.choice(self._draw, among)

    def fresh(self, prefix: str) -> str:
        return f"{prefix}{next(self._numbers)}"

    def _some(self, among: Sequence[str]) -> list[str]:
        return self._draw(st.lists(st.sampled_from(list(among)), max_size=3))

    def _variable(self, number: int, dtype: str) -> p.Variable:
        on_read = self.integer(0, 4) == 4
        among = ["NONE", "NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
        if dtype == "bool":
            among = ["NONE", "NONE", "ONLY_FIRST_REPLICA"]
        elif dtype == "int32" and not on_read:
            among = ["NONE", "NONE", "NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
        return p.Variable(f"w{number}", dtype, self.choice(among), on_read)

    def statements(self, most: int, depth: int) -> list[p.Statement]:
        """Draws the statements of a block."""
        block = []
        for _ in range(min(most, self.integer(1, most + 2))):  # rather many than few
            statement = self._statement(depth)
            if statement is None or statement.verdict not in self._kind.verdicts:
                statement = self._right()
            block.append(statement)
        return block

    def _right(self) -> p.Statement:
        """Draws a statement that is valid everywhere."""
        variable = self.variables[0]
        value = values.draw(self, "float32", equal=True)
        method = "assign_add" if writes.sums_its_own(variable, value) else "assign"
        line = f"{variable.name}.{method}({value.text})"
        return writes.statement(line, p.RIGHT, variable)

    def _statement(self, depth: int) -> p.Statement | None:
        kinds: list[Callable[[Any], p.Statement | None]] = [
            kind for kind, count in writes.KINDS.items() for _ in range(count)
        ]
        kinds += [updates.by_optimizer] * 6
        if depth < 2:
            kinds += [lambda by: by.region(depth)] * 5
        return self.choice(kinds)(self)

    # --- Control flow and functions ---------------------------------------------------

    def region(self, depth: int) -> p.Statement:
        """Draws statements in a conditional, a loop or a function."""
        inside = self.statements(2, depth + 1)
        kind = self.choice(["cond", "branches", "while", "function", "uneven"])
        name, other = self.fresh("body"), self.fresh("body")
        lines = ["    return 0.0"]
        if kind == "while":
            lines = [
                "    return [i + 1]",
                f"tf.while_loop(lambda i: i < 2, {name}, [0])",
            ]
        elif kind == "function":
            lines += [f"tf.function({name}, autograph=False)()"]
        else:
            test = self._uneven() if kind == "uneven" else self._test()
            lines += [f"tf.cond({test}, {name}, {{other}})"]
        lines = [line.replace("{other}", "lambda: 0.0") for line in lines]
        return self._made(kind, name, other, inside, lines)

    def _made(
        self,
        kind: str,
        name: str,
        other: str,
        inside: list[p.Statement],
        lines: list[str],
    ) -> p.Statement:
        turns = 2 if kind == "while" else 1
        verdict = p.verdict(inside)
        if kind == "uneven" and verdict == p.RIGHT:
            verdict = p.OPEN

        def effect(state: p.State) -> None:
            for _ in range(turns):
                for statement in inside:
                    statement.act(state)

        head = f"def {name}({'i' if kind == 'while' else ''}):"
        own = [line for statement in inside for line in statement.lines]
        written = {v.name: v for statement in inside for v in statement.writes}
        return p.Statement(
            (head, *p.indented(own), *lines),
            verdict,
            tuple(written.values()),
            None if kind == "uneven" else effect,
            tuple(line for statement in inside for line in statement.setup),
        )

    def _test(self) -> str:
        """Draws a condition that holds on all replicas, by construction."""
        mirrored = [v for v in self.variables if not v.on_read]
        names = [v.name for v in mirrored if v.dtype == "float32"]
        return self.choice(
            [
                "tf.reduce_sum(repl.all_reduce(x)) > -1.0",
                "tf.reduce_all(repl.broadcast(x) < 10.0)",
                *(f"{name}[0] < 1e9" for name in names),
            ]
        )

    def _uneven(self) -> str:
        """Draws a condition that may hold on some replicas only."""
        return self.choice(
            ["x[0] > 0.5", "tf.random.uniform([]) > 0.5", "opaque(True)"]
        )
