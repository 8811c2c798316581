# SPDX-License-Identifier: Apache-2.0
"""The rules of all types of ops, from the modules of rules/."""

from __future__ import annotations

import importlib
import pkgutil

from replicator.forms import rules
from replicator.forms.rule import RULES

__all__ = ["RULES"]

for module in pkgutil.iter_modules(rules.__path__):
    importlib.import_module(f"{rules.__name__}.{module.name}")
