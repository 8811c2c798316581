# SPDX-License-Identifier: Apache-2.0
"""A Hypothesis strategy for wrong programs and their expected errors."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st

from tests.spmd import changes, strategies
from tests.spmd import program as p

# A tf.function that all replicas share cannot differ on one of them.
_AROUND = strategies.Kind(replicas=(2, 3, 4), budget=6, shared=False, least=2)
_SMOOTH = dataclasses.replace(_AROUND, differentiate="tape")


@dataclasses.dataclass(frozen=True, repr=False)
class Wrong:
    """A program that must be refused.

    Attributes:
        kind: What is wrong with it: an entry of changes.KINDS.
        program: The program.
        error: The class of the error.
        says: A part of its message.
    """

    kind: str
    program: p.Program
    error: type[Exception]
    says: str

    def __repr__(self) -> str:
        return f"{self.kind}: {self.error.__name__} expected from{self.program}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@st.composite
def wrong_programs(draw: Any, kind: str) -> Wrong:
    """Draws a program that must be refused; `kind` is an entry of changes.KINDS."""
    around = _SMOOTH if kind == "gradient" else _AROUND
    program = draw(strategies.programs(around))
    change = changes.KINDS[kind](changes.Draw(draw, program))
    paths = [path for path, _ in p.walk(program.body)]
    path = draw(st.sampled_from([x for x in paths if len(x) == 1 or not change.top]))

    def put(statements: tuple[p.Statement, ...]) -> p.Block:
        return p.replace(program.body, path, lambda old: (*statements, old))

    program = dataclasses.replace(
        program,
        body=put(change.valid),
        broken=tuple((r, put(own)) for r, own in change.broken.items()),
    )
    return Wrong(kind, program, change.error, change.says)
