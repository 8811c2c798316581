# SPDX-License-Identifier: Apache-2.0
"""Renders the difference between two processes' values for messages."""

from __future__ import annotations

from typing import Any

from replicator import errors


def describe(value: Any, other_value: Any) -> tuple[str, str]:
    """Returns the first differing part of each of two JSON values, as text."""
    if isinstance(value, dict) and isinstance(other_value, dict):
        for name in {**value, **other_value}:
            if not (
                name in value
                and name in other_value
                and value[name] == other_value[name]
            ):
                return _fact(value, name), _fact(other_value, name)
    if isinstance(value, list) and isinstance(other_value, list):
        for a, b in zip(value, other_value, strict=False):
            if a != b:
                return _parts(a, b)
        if len(value) != len(other_value):
            return f"{len(value)} of them", f"{len(other_value)} of them"
    return errors.repr_of(value), errors.repr_of(other_value)


def _fact(facts: dict[Any, Any], name: Any) -> str:
    return f"{name}={errors.repr_of(facts[name])}" if name in facts else f"no {name}"


def _parts(value: Any, other_value: Any) -> tuple[str, str]:
    if isinstance(value, list) and isinstance(other_value, list):
        return ", ".join(map(str, value)), ", ".join(map(str, other_value))
    return errors.repr_of(value), errors.repr_of(other_value)
