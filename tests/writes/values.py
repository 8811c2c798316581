# SPDX-License-Identifier: Apache-2.0
"""Draws the values that a program writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from tests.writes import program as p

T = TypeVar("T")
_Values = p.Values | None


class Drawing(Protocol):
    """The source of random choices: `strategies.Maker`."""

    variables: tuple[p.Variable, ...]
    mode: str
    check: bool
    sharded: bool

    def integer(self, least: int, most: int) -> int: ...

    def choice(self, among: Sequence[T]) -> T: ...

    def fresh(self, prefix: str) -> str: ...


def draw(
    by: Drawing, dtype: str, equal: bool = False, silent: bool = False, deep: int = 1
) -> p.Expression:
    """Draws a value of SIZE elements.

    Args:
        by: The source of choices.
        dtype: Its dtype.
        equal: Whether it has to be equal on all replicas by construction.
        silent: Whether it must not communicate.
        deep: How many more levels there may be.
    """
    kinds: list[Callable[[], p.Expression]] = [lambda: _constant(by, dtype)]
    readable = [v for v in by.variables if v.dtype == dtype and not equal & v.on_read]
    if readable:
        kinds += [lambda: _read(by, by.choice(readable))] * 2
    kinds += [lambda: _same_random(dtype)]
    if not equal:
        kinds += [lambda: _input(dtype)] * 3
        kinds += [lambda: _random(dtype), lambda: _python(by, dtype)]
    if deep:
        if not silent and dtype != "bool":
            kinds += [lambda: _reduced(by, dtype, deep)] * 2
        kinds += [lambda: _joined(by, dtype, equal, silent, deep)] * 2
        if not equal:
            kinds += [lambda: _own(by, dtype, deep)]
    return by.choice(kinds)()


def _known(text: str, equal: bool, value: Callable[[p.State], Any]) -> p.Expression:
    return p.Expression(text, equal, True, value)


def _constant(by: Drawing, dtype: str) -> p.Expression:
    number = by.integer(0, 3)
    value = np.full([p.SIZE], number / (2 if dtype == "float32" else 1)).astype(dtype)
    text = f"tf.constant({value.tolist()}, tf.{dtype})"
    return _known(text, True, lambda state: [value for _ in state.everyone])


def _read(by: Drawing, variable: p.Variable) -> p.Expression:
    def value(state: p.State) -> _Values:
        held = state.held[variable.name]
        if held is None or variable.dtype == "bool":
            return held
        if variable.dtype == "int32":
            return [x % 7 for x in held]
        return [x * np.float32(0.5) for x in held]

    text = {
        "bool": f"{variable.name}.read_value()",
        "int32": f"({variable.name} % 7)",
        "float32": f"({variable.name} * 0.5)",
    }[variable.dtype]
    return _known(text, not variable.on_read, value)


def _same_random(dtype: str) -> p.Expression:
    text = {
        "bool": "(tf.random.stateless_uniform([3], [1, 2]) > 0.5)",
        "int32": "tf.random.stateless_uniform([3], [1, 2], 0, 9, tf.int32)",
        "float32": "tf.random.stateless_normal([3], [1, 2])",
    }[dtype]
    return _known(text, True, lambda state: None)


def _random(dtype: str) -> p.Expression:
    text = {
        "bool": "(tf.random.uniform([3]) > 0.5)",
        "int32": "tf.random.uniform([3], 0, 9, tf.int32)",
        "float32": "tf.random.normal([3])",
    }[dtype]
    return _known(text, False, lambda state: None)


def _input(dtype: str) -> p.Expression:
    text, value = {
        "bool": ("(x > 0.5)", lambda x: x > 0.5),
        "int32": ("tf.cast(x * 8.0, tf.int32)", lambda x: (x * 8).astype(np.int32)),
        "float32": ("x", lambda x: x),
    }[dtype]
    return _known(text, False, lambda state: [value(x) for x in state.x])


def _python(by: Drawing, dtype: str) -> p.Expression:
    """The result of a Python function, which may read a variable."""
    readable = [v for v in by.variables if v.dtype == dtype]
    if readable and by.mode != "session":
        name = by.choice(readable).name
        return _known(f"python(lambda: {name}.numpy(), tf.{dtype})", False, _nobody)
    base = _input(dtype)
    text = (
        f"tf.ensure_shape(tf.py_function(lambda v: v, [{base.text}], tf.{dtype}), [3])"
    )
    return _known(text, False, base.value)


def _nobody(state: p.State) -> None:
    return None


def _reduced(by: Drawing, dtype: str, deep: int) -> p.Expression:
    source = draw(by, dtype, deep=deep - 1)
    how = by.choice(["sum", "max", "first"])

    def value(state: p.State) -> _Values:
        values = source.value(state)
        if values is None:
            return None
        one = values[0]
        if how == "sum":
            one = sum(values[1:], values[0])
        elif how == "max":
            one = np.max(values, 0)
        return [one.astype(dtype)] * len(values)

    if how == "first":
        text = f"repl.broadcast({source.text})"
    else:
        text = f'repl.all_reduce({source.text}, "{how}")'
    return p.Expression(text, True, False, value)


def _joined(
    by: Drawing, dtype: str, equal: bool, silent: bool, deep: int
) -> p.Expression:
    one, two = (draw(by, dtype, equal, silent, deep - 1) for _ in range(2))
    operator = {
        "bool": "tf.math.logical_xor({}, {})",
        "int32": "(({} + {}) % 7)",
        "float32": "(({} + {}) / 2.0)",
    }[dtype]

    def value(state: p.State) -> _Values:
        a, b = one.value(state), two.value(state)
        if a is None or b is None:
            return None
        together = {
            "bool": lambda a, b: a ^ b,
            "int32": lambda a, b: (a + b) % 7,
            "float32": lambda a, b: (a + b) / np.float32(2),
        }[dtype]
        return [together(*pair) for pair in zip(a, b, strict=True)]

    text = operator.format(one.text, two.text)
    both = one.equal and two.equal
    return p.Expression(text, both, one.silent and two.silent, value)


def _own(by: Drawing, dtype: str, deep: int) -> p.Expression:
    """Replica 0 has a different value than the others."""
    one, two = (draw(by, dtype, silent=True, deep=deep - 1) for _ in range(2))

    def value(state: p.State) -> _Values:
        a, b = one.value(state), two.value(state)
        if a is None or b is None:
            return None
        return [a[r] if r else b[r] for r in state.everyone]

    return _known(f"({one.text} if repl.replica_id else {two.text})", False, value)
