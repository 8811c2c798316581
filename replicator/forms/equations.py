# SPDX-License-Identifier: Apache-2.0
"""Ops whose axes are related as an equation of their names says, as einsum's.

Whichever axis is sharded, the equation says the rest. "nk,km->nm": if n is sharded, the
result is; if k is, each replica computes a summand of the result; m is tensor
parallelism. In "...,...->..." all axes broadcast. Digits name axes of which no op can
take parts: "...0->...", a sort.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.forms.forms import REPLICATED, Fact, Form, Partial, Sharded, equal
from replicator.forms.rule import OpPlan, plan
from replicator.graph.ir import shapes

_NAMES = "abcdefghijklmnopABCDEFGHIJKLMNOP"
_UNKNOWN = 64  # elements of an axis of unknown length, where costs are compared


def by_axes(op: tf.Operation, facts: Sequence[Fact], equation: str) -> OpPlan | None:
    """Returns the plan of an op of which inputs are sharded, but not of diagonals.

    Of several sharded axes, that one is kept which leaves least to be gathered.

    Args:
        op: The op.
        facts: What is known of its inputs.
        equation: The names of each input's axes, and of the outputs'.
    """
    shards = [k for k, fact in enumerate(facts) if isinstance(fact.form, Sharded)]
    ranks = tuple(t.shape.rank for t in op.inputs)
    if not shards or None in ranks:
        return None
    terms, output = _spelled(equation, ranks)
    if any(len(set(term)) < len(term) for term in (*terms, output)):
        return None
    found = [_kept(op, facts, terms, output, k) for k in shards]
    best = min((one for one in found if one), key=lambda one: one[0], default=None)
    return best and best[1]


@functools.lru_cache(1024)
def _spelled(equation: str, ranks: tuple[int, ...]) -> tuple[list[str], str]:
    """Returns the terms of an equation with a name for each axis of an ellipsis."""
    left, _, output = equation.partition("->")
    terms = left.split(",")
    free = [name for name in _NAMES if name not in left]
    spread = [
        rank - len(term.replace("...", "")) if "..." in term else 0
        for term, rank in zip(terms, ranks, strict=True)
    ]
    dots = "".join(free[: max(spread)])
    terms = [
        term.replace("...", dots[len(dots) - count :])
        for term, count in zip(terms, spread, strict=True)
    ]
    return terms, output.replace("...", dots)


def _kept(
    op: tf.Operation, facts: Sequence[Fact], terms: Sequence[str], output: str, k: int
) -> tuple[Any, OpPlan] | None:
    """Returns the plan that keeps the k-th input's axis sharded, after its cost."""
    form = facts[k].form
    assert isinstance(form, Sharded)
    name = terms[k][form.axis : form.axis + 1]
    if not name or name.isdigit() or shapes.size(op.inputs[k], form.axis) == 1:
        return None  # of one row, it broadcasts
    needs: list[Form] = []
    for tensor, fact, names in zip(op.inputs, facts, terms, strict=True):
        size = shapes.size(tensor, names.index(name)) if name in names else 1
        need = REPLICATED if size == 1 else form.at(names.index(name))
        if (size, form.factor) == (None, None) and not equal(fact.form, need):
            return None  # it may broadcast, which parts of it would not
        needs.append(need)
    is_kept = name in output
    made = form.at(output.index(name)) if is_kept else Partial()
    moved = sum(
        _moved(tensor, fact.form, need)
        for tensor, fact, need in zip(op.inputs, facts, needs, strict=True)
    )
    return (moved, not is_kept, k), plan(op, needs, made)


def _moved(tensor: tf.Tensor, have: Form, need: Form) -> int:
    """About how many elements a conversion moves."""
    if have in (REPLICATED, need):
        return 0
    return math.prod(size or _UNKNOWN for size in shapes.sizes(tensor))
