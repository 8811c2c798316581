# SPDX-License-Identifier: Apache-2.0
"""The rules of all types of ops, from the modules of rules/."""

from __future__ import annotations

from replicator.forms.rule import Rule
from replicator.forms.rules import (
    control_flow,
    elementwise,
    lists,
    lookups,
    normalization,
    products,
    random,
    recurrent,
    reductions,
    rows,
    shapes,
    slices,
    state,
)

MODULES = (
    control_flow,
    elementwise,
    lists,
    lookups,
    normalization,
    products,
    random,
    recurrent,
    reductions,
    rows,
    shapes,
    slices,
    state,
)
RULES: dict[str, Rule] = {}
for module in MODULES:
    RULES.update(module.RULES)
