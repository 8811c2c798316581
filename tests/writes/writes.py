# SPDX-License-Identifier: Apache-2.0
"""Draws the statements that write a variable: methods, parts, ops, choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.writes import program as p
from tests.writes import values
from tests.writes.values import Drawing

_METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "assign": lambda held, value: value,
    "assign_add": lambda held, value: held + value,
    "assign_sub": lambda held, value: held - value,
}


def statement(
    line: str,
    verdict: str,
    variable: p.Variable,
    effect: Callable[[p.State], None] | None = None,
) -> p.Statement:
    """Returns a one-line statement that writes one variable."""
    return p.Statement((line,), verdict, (variable,), effect)


def _is_taken_as_equal(variable: p.Variable) -> bool:
    """Whether the library assumes that written values are equal."""
    plain = variable.aggregation == "NONE" and not variable.on_read
    return plain and variable.dtype != "float32"


def _written(by: Drawing, variable: p.Variable) -> p.Expression:
    """Draws a valid argument for a method of a variable."""
    equal = _is_taken_as_equal(variable) and not by.check
    return values.draw(by, variable.dtype, equal)


def _verdict(by: Drawing, variable: p.Variable, equal: bool) -> str:
    """Returns the verdict on an argument of a method."""
    if variable.aggregation == "MEAN" and variable.dtype == "int32":
        return p.RIGHT if variable.on_read else p.WRONG
    if _is_taken_as_equal(variable) and not equal:
        return p.OPEN  # compared when the step runs
    return p.RIGHT


def sums_its_own(variable: p.Variable, value: p.Expression) -> bool:
    """Whether replicas would sum values that are made of the variable's own."""
    sums = variable.aggregation == "SUM" and not variable.on_read
    return sums and variable.name in value.text


def by_method(by: Drawing) -> p.Statement:
    """Draws an assignment of the whole value."""
    variable = by.choice(by.variables)
    value = _written(by, variable)
    method = "assign"
    if variable.dtype != "bool":
        method = by.choice(list(_METHODS))

    def effect(state: p.State) -> None:
        values, held = value.value(state), state.held[variable.name]
        if values is None or held is None:
            return state.forget([variable])
        agreed = variable.agreed(values)
        pairs = zip(held, agreed, strict=True)
        state.held[variable.name] = [_METHODS[method](*pair) for pair in pairs]

    verdict = _verdict(by, variable, value.equal)
    if method == "assign" and verdict == p.RIGHT and sums_its_own(variable, value):
        verdict = p.OPEN  # it depends on what is made of it
    line = f"{variable.name}.{method}({value.text})"
    return statement(line, verdict, variable, effect)


_PARTS = {
    "scatter_add": (".scatter_add(tf.IndexedSlices({v}[:1], [{i}]))", "assign_add"),
    "scatter_sub": (".scatter_sub(tf.IndexedSlices({v}[:1], [{i}]))", "assign_sub"),
    "scatter_update": (".scatter_update(tf.IndexedSlices({v}[:1], [{i}]))", "assign"),
    "scatter_nd_add": (".scatter_nd_add([[{i}]], {v}[:1])", "assign_add"),
    "slice": ("[{i}].assign({v}[0])", "assign"),
}


def by_part(by: Drawing) -> p.Statement | None:
    """Draws an assignment of one element, whose index may differ by replica."""
    among = [v for v in by.variables if v.dtype != "bool"]
    if not among:
        return None
    variable = by.choice(among)
    value = _written(by, variable)
    text, method = _PARTS[by.choice(list(_PARTS))]
    same = by.integer(0, 2) > 0 or _is_taken_as_equal(variable) and not by.check
    verdict = _verdict(by, variable, value.equal and same)
    sums = variable.aggregation == "SUM" and not variable.on_read
    if sums and method == "assign":
        verdict = p.WRONG  # what is added to a part has a sum, its values have none

    def effect(state: p.State) -> None:
        values, held = value.value(state), state.held[variable.name]
        if values is None or held is None:
            return state.forget([variable])
        changed = [np.copy(x) for x in held]
        for r, x in enumerate(changed):
            place = 1 if same else r
            x[place] = _METHODS[method](x[place], values[r][0])
        if sums:
            total = sum(x - y for x, y in zip(changed, held, strict=True))
            changed = [y + total for y in held]
        else:
            changed = variable.agreed(changed)
        state.held[variable.name] = changed

    line = variable.name + text.format(v=value.text, i=1 if same else "repl.replica_id")
    return statement(line, verdict, variable, effect)


_OPS = {
    "tf.raw_ops.AssignVariableOp(resource={w}.handle, value={v})": "assign",
    "tf.raw_ops.AssignAddVariableOp(resource={w}.handle, value={v})": "assign_add",
    "tf.raw_ops.AssignSubVariableOp(resource={w}.handle, value={v})": "assign_sub",
    "tf.raw_ops.ResourceScatterAdd("
    "resource={w}.handle, indices=[0, 1, 2], updates={v})": "assign_add",
    "tf.compat.v1.scatter_update({w}, [0, 1, 2], {v})": "assign",
}


def by_op(by: Drawing) -> p.Statement | None:
    """Draws a write by a TensorFlow op, which is not aggregated."""
    among = [v for v in by.variables if v.dtype != "bool"]
    if not among:
        return None
    variable = by.choice(among)
    value = values.draw(by, variable.dtype, equal=by.integer(0, 3) > 0)
    text = by.choice(list(_OPS))
    method = _OPS[text]

    def effect(state: p.State) -> None:
        own_values, held = value.value(state), state.held[variable.name]
        if own_values is None or held is None:
            return state.forget([variable])
        pairs = zip(held, own_values, strict=True)
        state.held[variable.name] = [_METHODS[method](*pair) for pair in pairs]

    right = value.equal or variable.on_read
    line = text.format(w=variable.name, v=value.text)
    return statement(line, p.RIGHT if right else p.WRONG, variable, effect)


def by_python(by: Drawing) -> p.Statement | None:
    """Draws a Python function that writes, which is refused when it runs."""
    among = [v for v in by.variables if v.dtype == "float32"]
    if not among or by.mode == "session":
        return None
    variable = by.choice(among)
    function = by.choice(["py_function", "numpy_function"])
    line = (
        f"tf.{function}(lambda: np.float32({variable.name}.assign_add([1.0] * 3)[0]), "
        "[], tf.float32)"
    )
    return statement(line, p.WRONG, variable)


# --- Writes that depend on the replica ------------------------------------------------


def of_another(by: Drawing) -> p.Statement | None:
    """Draws a write to one variable on replica 0, and to another one elsewhere."""
    one = by.choice(by.variables)
    among = [v for v in by.variables if v.dtype == one.dtype and v != one]
    if not among:
        return None
    two = by.choice(among)
    value = values.draw(by, one.dtype, equal=one.dtype != "float32")
    right = one.on_read and two.on_read
    line = f"({one.name} if repl.replica_id else {two.name}).assign({value.text})"
    verdict = p.RIGHT if right else p.WRONG
    return p.Statement((line,), verdict, (one, two))


def by_another_method(by: Drawing) -> p.Statement | None:
    """Draws a write by one method on replica 0, and by another one elsewhere."""
    among = [v for v in by.variables if v.dtype != "bool"]
    if not among:
        return None
    variable = by.choice(among)
    value = values.draw(by, variable.dtype, equal=variable.dtype != "float32")
    one, two = by.choice(
        [
            ("assign_add", "assign_sub"),
            ("assign", "assign_add"),
            ("assign", "assign_sub"),
        ]
    )
    line = (
        f"({variable.name}.{one} if repl.replica_id else {variable.name}.{two})"
        f"({value.text})"
    )
    return statement(line, p.RIGHT if variable.on_read else p.WRONG, variable)


def on_one(by: Drawing) -> p.Statement:
    """Draws a write that one replica makes alone."""
    variable = by.choice(by.variables)
    value = values.draw(
        by, variable.dtype, equal=variable.dtype != "float32", silent=True
    )
    lines = (
        "if repl.replica_id == 1:",
        f"    {variable.name}.assign({value.text})",
    )
    verdict = p.RIGHT if variable.on_read else p.WRONG
    return p.Statement(lines, verdict, (variable,))


def in_another_order(by: Drawing) -> p.Statement | None:
    """Draws writes to two variables, in another order on replica 0 than elsewhere.

    Values that are assumed equal cost no communication, and have no order.
    """
    one = by.choice(by.variables)
    among = [v for v in by.variables if v.dtype == one.dtype and v != one]
    if not among:
        return None
    two = by.choice(among)
    value = values.draw(by, one.dtype, one.dtype != "float32", silent=True, deep=0)
    silent = all(
        v.on_read or _is_taken_as_equal(v) and not by.check for v in (one, two)
    )
    lines = (
        f"for v in ({one.name}, {two.name})[:: -1 if repl.replica_id else 1]:",
        f"    v.assign({value.text})",
    )
    reads = one.name in value.text or two.name in value.text
    verdict = p.RIGHT if silent and not reads else p.OPEN
    return p.Statement(lines, verdict, (one, two))


KINDS: dict[Callable[[Drawing], p.Statement | None], int] = {
    by_method: 6,
    by_part: 3,
    by_op: 3,
    by_python: 1,
    of_another: 1,
    by_another_method: 1,
    on_one: 1,
    in_another_order: 1,
}
