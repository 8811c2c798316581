# SPDX-License-Identifier: Apache-2.0
"""Refuses assignments that layers and optimizers make while a step builds them.

A layer or an optimizer that is first called in a step creates its variables there,
which is fine: they exist from then on. What it assigns to them at the same time must
not become part of the step. If all replicas share the object, only the first would
assign; in a graph, every step would assign again; and after a failed build the object
takes itself for built and would never assign again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import callers
from replicator.graph.order.effects import find_writes


def is_done(variable: Any, replica: context.ReplicaContext) -> bool | None:
    """Classifies a write, in a step, to a variable that the step may have created.

    Args:
        variable: The ReplicatedVariable that is about to be written.
        replica: The replica being built.

    Returns:
        None for a write that is part of the step. Otherwise legacy Keras is building a
        layer outside the function being traced, so its assignments run eagerly: True if
        this one ran when the variable was new, False if it has yet to run.

    Raises:
        ContextError: The build() of a layer or an optimizer would make the write part
            of the step.
    """
    created = replica.build.created.get(variable.key)
    if created is None:
        return None
    builder = callers.builder()
    if builder is None:
        created.line = created.line or errors.user_line()
        created.writes[replica.build.number, replica.replica_id] += 1
        return None
    if tf.executing_eagerly():
        return not created.new
    _refuse(variable, f"the build() of {builder}", [f"at {errors.user_line()}"])
    return None


def check(build: context.Build) -> None:
    """Raises ContextError if replicas wrote a variable unequally where it was created.

    Args:
        build: The build, after step_fn was called for all replicas.
    """
    for created in build.created.values():
        if created.variable.placement.differs or created.line is None:
            continue
        counts = [created.writes[build.number, r] for r in build.traced]
        if min(counts) and min(counts) == max(counts):
            continue
        sites = [f"at {created.line}"]
        sites += [
            f"replica {r}: {count} writes"
            for r, count in zip(build.traced, counts, strict=True)
        ]
        _refuse(created.variable, "a replica", sites)


def _refuse(variable: Any, who: str, sites: Sequence[str]) -> None:
    """Raises ContextError, now and whenever a step uses the variable.

    Assigning to the variable outside a step ends that.
    """
    variable.unbuilt = (
        f"{who} assigns to variable {variable.name} where the variable is created, in "
        "a step: that would happen on one replica only, or in every step.",
        sites,
        "create the object that holds it again, outside step_fn and under "
        "`with repl.context():`, and build it there: call it once, or call its "
        "build(...).",
    )
    refuse_use(variable)


def refuse_use(variable: Any) -> None:
    """Raises ContextError if a variable still lacks the value it was to be assigned.

    Args:
        variable: The ReplicatedVariable that a step uses.
    """
    if variable.unbuilt is not None:
        problem, sites, fix = variable.unbuilt
        raise errors.ContextError(problem, sites, fix)


def refuse_graph_writes(who: str, ops: Sequence[tf.Operation]) -> None:
    """Raises ContextError if building an optimizer in a tf.Graph writes variables.

    Code outside a tf.function runs at once, while the function is traced once. In a
    tf.Graph, nothing would run the write, or each step would.

    Args:
        who: The class of the optimizer.
        ops: The ops added to the tf.Graph while the optimizer was built.
    """
    added, initialized = set(ops), set()
    for op, handle in find_writes(ops):
        if handle.op in added and handle.op not in initialized:
            initialized.add(handle.op)  # each variable's first write is its initializer
            continue
        raise errors.ContextError(
            f"the optimizer {who} assigns to variable {handle.op.name} while it is "
            f"built ({op.type}): in a tf.Graph, no session would run that once.",
            [f"at {errors.line_of(op)}"],
            "use it eagerly or in a tf.function, where it is built once; or use an "
            "optimizer that does not.",
        )
