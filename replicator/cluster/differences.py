# SPDX-License-Identifier: Apache-2.0
"""Renders the difference between two processes' values for messages."""

from __future__ import annotations

from typing import Any

from replicator import errors


def shown(one: Any, other: Any) -> tuple[str, str]:
    """Returns the first differing part of each of two JSON values, as text."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in {**one, **other}:
            if not (name in one and name in other and one[name] == other[name]):
                return _fact(one, name), _fact(other, name)
    if isinstance(one, list) and isinstance(other, list):
        for a, b in zip(one, other, strict=False):
            if a != b:
                return _parts(a, b)
        if len(one) != len(other):
            return f"{len(one)} of them", f"{len(other)} of them"
    return errors.shown(one), errors.shown(other)


def _fact(facts: dict[Any, Any], name: Any) -> str:
    return f"{name}={errors.shown(facts[name])}" if name in facts else f"no {name}"


def _parts(one: Any, other: Any) -> tuple[str, str]:
    if isinstance(one, list) and isinstance(other, list):
        return ", ".join(map(str, one)), ", ".join(map(str, other))
    return errors.shown(one), errors.shown(other)
