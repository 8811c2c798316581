# SPDX-License-Identifier: Apache-2.0
"""Reads a plan from its JSON text and refuses anything else.

Plans are printed, plotted and summed later, where an entry of the wrong type would fail
far from its cause. Therefore every field is checked against its type in Row.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from replicator import arguments, errors
from replicator.graph.ir.placeholder import Shape
from replicator.report.rows import Rows

_R = typing.TypeVar("_R", bound=Rows)

_MOST = 2**63 - 1  # bytes, iterations, entries, ids


class _NoPlan(Exception):
    """The text is not a plan."""


def read(kind: type[_R], text: str) -> _R:
    """Returns the plan that `Plan.to_json` turned into this text.

    Args:
        kind: The class of the plan.
        text: The text.

    Raises:
        ArgumentError: The text is not a plan.
    """
    try:
        if not isinstance(text, str | bytes | bytearray):
            raise _NoPlan(f"expected a str, not {errors.repr_of(text)}")
        plan = _read(kind, json.loads(text), "the plan")
        _check(plan)
        return plan
    except (_NoPlan, ValueError, RecursionError) as error:
        name = "" if isinstance(error, _NoPlan) else f"{type(error).__name__} "
        raise errors.ArgumentError(
            f"this is not the JSON text of a plan: {name}{error}.",
            fix="pass what `Plan.to_json` returned.",
        ) from error


def _read(hint: Any, value: Any, where: str) -> Any:
    """Converts a JSON value to the type of a hint."""
    kind, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _read_fields(hint, value, where)
    if kind is types.UnionType:
        if value is None:
            return None
        return _read(args[0], value, where)
    if kind is tuple and isinstance(value, list):
        return tuple(_read(args[0], x, f"{where}[{n}]") for n, x in enumerate(value))
    if kind is Mapping and isinstance(value, dict):
        return value
    if hint is str and isinstance(value, str):
        value.encode()  # a lone surrogate cannot be printed
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is float and isinstance(value, float) and 0 <= value < math.inf:
        return value
    if hint is int and arguments.is_whole(value, 0, _MOST):
        return value
    raise _NoPlan(f"{where} is {errors.repr_of(value)}")


def _read_fields(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _NoPlan(f"{where} is {errors.repr_of(value)}")
    hints = typing.get_type_hints(cls, localns={"Shape": Shape})
    facts = {}
    for field in dataclasses.fields(cls):
        if field.name not in value:
            if field.default is not dataclasses.MISSING:
                continue  # a plan written by an earlier version
            raise _NoPlan(f"{where} has no {field.name}")
        place = f"{where}.{field.name}"
        facts[field.name] = _read(hints[field.name], value[field.name], place)
    return cls(**facts)


def _check(plan: Rows) -> None:
    """Raises _NoPlan unless a plan's numbers are consistent."""
    if not plan.devices:
        raise _NoPlan("the plan has no devices")
    for n, row in enumerate(plan.rows):
        ids = {*row.group, *(r for x in row.links for r in (x.source, x.destination))}
        if any(max(x.source, x.destination) >= len(plan.hosts) for x in row.wires):
            raise _NoPlan(
                f"row {n} names a host that is not among the {len(plan.hosts)}"
            )
        if not row.group:
            raise _NoPlan(f"row {n} names no replica")
        if max(ids) >= len(plan.devices):
            raise _NoPlan(
                f"row {n} names replicas that are not among the {len(plan.devices)}"
            )
        if len(row.operands) != len(row.group):
            raise _NoPlan(f"row {n} does not say what each of its replicas passes")
