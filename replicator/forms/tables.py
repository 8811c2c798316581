# SPDX-License-Identifier: Apache-2.0
"""The rules of all types of ops, from the modules of rules/."""

from __future__ import annotations

import importlib
import pkgutil

from replicator.forms import rules
from replicator.forms.rule import Rule


def _merged() -> dict[str, Rule]:
    table: dict[str, Rule] = {}
    for module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
        table.update(getattr(importlib.import_module(module.name), "RULES", {}))
    return table


RULES = _merged()
