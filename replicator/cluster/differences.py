# SPDX-License-Identifier: Apache-2.0
"""What differs between what two processes tell, for people."""

from __future__ import annotations

from typing import Any

from replicator import errors


def shown(one: Any, other: Any) -> tuple[str, str]:
    """Returns the parts by which two JSON values differ, for people."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = [key for key in one if one[key] != other.get(key)]
        if names:
            shown = (errors.shown(facts.get(names[0])) for facts in (one, other))
            first, second = (f"{names[0]}={text}" for text in shown)
            return first, second
    if isinstance(one, list) and isinstance(other, list):
        for a, b in zip(one, other, strict=False):
            if a != b:
                return _listed(a), _listed(b)
        if len(one) != len(other):
            return f"{len(one)} of them", f"{len(other)} of them"
    return errors.shown(one), errors.shown(other)


def _listed(part: Any) -> str:
    return ", ".join(map(str, part)) if isinstance(part, list) else errors.shown(part)
