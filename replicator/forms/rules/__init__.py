# SPDX-License-Identifier: Apache-2.0
"""The rules of all ops, by their types; an op without one takes replicated inputs."""

from __future__ import annotations

import importlib
import pkgutil

from replicator.forms.rule import RULES

__all__ = ["RULES"]

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
