# SPDX-License-Identifier: Apache-2.0
"""Random programs, as text: communication in control flow, and its derivatives.

A program is a function of a world and a tensor, as in elementwise.py. Hypothesis draws
its lines, and shrinks and prints one that fails.
"""

from __future__ import annotations

import dataclasses
import linecache
from collections.abc import Callable
from typing import Any

import hypothesis
import tensorflow as tf
from hypothesis import strategies as st

from tests.programs import elementwise
from tests.programs import program as p

FILE = "program.py"  # the file name of a program in messages
_MOST = (5, 3, 2)  # statements of a block, by its depth
_CALLS = (
    *("all_reduce({x})", 'all_reduce({x}, "mean")', 'all_reduce({x}, "max")'),
    *("gathered({x})", "first({x})", "weighted({x})", "shifted({x})", "sent({x})"),
    *("scattered({x})", "exchanged({x})", "by_parity({x})"),
)
_LOCALS = (
    "tf.sin({x})",
    "tf.tanh({x}) * {y}",
    "0.5 * ({x} - {y})",
    "{x} + tf.cos({y})",
)
_ASKS = ("sent", "weighted", "by_parity")  # calls that ask which replica it is
# What runs a block of one argument; its result, and a variable of the same kind.
_REGIONS = (
    "tf.cond(world.known(True), lambda: {f}({x}), lambda: {y})",
    "tf.cond(world.known(False), lambda: {f}({x}), lambda: {y})",
    "tf.cond(world.total({x}) > 0.0, lambda: {f}({x}), lambda: {y})",
    "tf.switch_case(world.known(1), [lambda: {y}, lambda: {f}({x}), lambda: {x}])",
    "tf.while_loop(lambda k, a: k < 2, lambda k, a: (k + 1, {f}(a)), [0, {x}])[1]",
    "tf.while_loop(lambda a: world.total(a * a) < 9.0, lambda a: [{f}(a)], [{x}], "
    "maximum_iterations=2)[0]",
    "tf.function({f}, autograph=False)({x}) + {y}",
    "tf.reduce_sum(tf.map_fn({f}, tf.stack([{x}, 2.0 * {y}])), 0)",
    "tf.scan(lambda a, b: 0.5 * a + {f}(b), tf.stack([{x}, {y}]), initializer={y})[-1]",
)


@dataclasses.dataclass(frozen=True)
class Text:
    """The lines of a program, with their indentation; the last one returns."""

    lines: tuple[str, ...]

    def __repr__(self) -> str:
        return "\n" + "\n".join(self.lines)

    @property
    def asks(self) -> bool:
        """Whether it asks which replica it is."""
        return any(f".{name}(" in line for line in self.lines for name in _ASKS)

    def function(self) -> elementwise.Function:
        """Compiles it."""
        text = "\n".join(self.lines) + "\n"
        linecache.cache[FILE] = (len(text), None, text.splitlines(True), FILE)
        names: dict[str, Any] = {"tf": tf}
        exec(compile(text, FILE, "exec"), names)
        return tf.autograph.experimental.do_not_convert(names["program"])

    def program(self, by: elementwise.Differentiate, order: int = 1) -> p.Program:
        """Returns it as a program of the catalogue."""
        tags = (p.ASKS,) if self.asks else ()
        return elementwise.as_program(
            self.function(), *tags, by=by, order=order, name=repr(self)
        )


class _Writer:
    """Draws lines."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw, self._numbers = draw, 0
        self.lines: list[str] = []

    def block(self, names: list[str], depth: int) -> str:
        """Draws the lines of a block; returns the name of its result."""
        names = list(names)
        for _ in range(self._draw(st.integers(1, _MOST[depth]))):
            kinds = [*_CALLS] * 2 + [*_LOCALS]
            deeper = list(_REGIONS) * 2 if depth + 1 < len(_MOST) else []
            line = self._draw(st.sampled_from([*kinds, *deeper]))
            newest = st.sampled_from(names[-3:])
            x, y = self._draw(newest), self._draw(newest)
            function = f"f{self._number()}" if line in _REGIONS else ""
            if function:
                self._write(f"def {function}(a):", depth)
                self._write(f"    return {self.block([*names, 'a'], depth + 1)}", depth)
            line = line.format(x=x, y=y, f=function)
            if not function and line.partition("(")[0] in _NAMES:
                line = f"world.{line}"
            names.append(f"v{self._number()}")
            self._write(f"{names[-1]} = {line}", depth)
        return names[-1]

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _write(self, line: str, depth: int) -> None:
        self.lines.append("    " * (depth + 1) + line)


_NAMES = {call.partition("(")[0] for call in _CALLS}


@st.composite
def texts(draw: Any) -> Text:
    """Draws a program."""
    writer = _Writer(draw)
    result = writer.block(["x"], 0)
    return Text(("def program(world, x):", *writer.lines, f"    return {result}"))


def for_all(strategy: Any, check: Callable[[Any], None], count: int, seed: int) -> int:
    """Checks `count` programs, by the seed; returns how many were drawn."""
    checked = 0

    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.seed(seed)
    @hypothesis.given(strategy)
    def one(program: Any) -> None:
        nonlocal checked
        check(program)
        checked += 1

    one()
    return checked
