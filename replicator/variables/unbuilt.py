# SPDX-License-Identifier: Apache-2.0
"""What assigns to its variables while it is built, once, is not built inside a step.

A layer or an optimizer that is first called in a step creates its variables there,
which is fine: they exist from then on. What it assigns to them then is another matter.
If all replicas share the object, only the first of them assigns; in a graph, every step
would assign again; and once a build has failed, the object takes itself for built, and
would never assign again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.graph.order.effects import find_writes


def is_done(variable: Any, replica: context.ReplicaContext) -> bool | None:
    """Looks at a write in a step, of what may be created there.

    Args:
        variable: The ReplicatedVariable that is about to be written.
        replica: The replica being built.

    Returns:
        None for a write that is part of the step. Legacy Keras builds layers outside of
        the function being traced: what they assign then, they do at once. False where
        that is to be done, True where it was when the variable was new.

    Raises:
        ContextError: The build() of a layer or an optimizer makes the write a part of
            the step.
    """
    created = replica.build.created.get(variable.key)
    if created is None:
        return None
    builder = _tf.builder()
    if builder is None:
        created.line = created.line or errors.user_line()
        created.writes[replica.build.number, replica.replica_id] += 1
        return None
    if tf.executing_eagerly():
        return not created.new
    _refuse(variable, f"the build() of {builder}", [f"at {errors.user_line()}"])
    return None


def check(build: context.Build) -> None:
    """Raises ContextError if variables were written where they were created only.

    Args:
        build: The build, once step_fn was called for all replicas.
    """
    for created in build.created.values():
        if created.variable.placement.differs or created.line is None:
            continue
        own = [created.writes[build.number, r] for r in build.traced]
        if min(own) and min(own) == max(own):
            continue
        sites = [f"at {created.line}"]
        sites += [
            f"replica {r}: {count} writes"
            for r, count in zip(build.traced, own, strict=True)
        ]
        _refuse(created.variable, "a replica", sites)


def _refuse(variable: Any, who: str, sites: Sequence[str]) -> None:
    """Raises ContextError, now and whenever a step uses a variable from now on.

    That ends where the variable is assigned to outside of a step.
    """
    variable.unbuilt = (
        f"{who} assigns to variable {variable.name} where the variable is created, in "
        "a step: that would happen on one replica only, or in every step.",
        sites,
        "make what it belongs to outside of step_fn, and build it under context() "
        "first: `with repl.context():` make it anew, and call it once or its "
        "build(...).",
    )
    refuse_use(variable)


def refuse_use(variable: Any) -> None:
    """Raises ContextError if a variable was never assigned what it was meant to be.

    Args:
        variable: The ReplicatedVariable that a step uses.
    """
    if variable.unbuilt is not None:
        raise errors.ContextError(errors.compose(*variable.unbuilt))


def refuse_graph_writes(who: str, ops: Sequence[tf.Operation]) -> None:
    """Raises ContextError if an optimizer writes variables while a graph builds it.

    A function is traced once, and what is outside of it runs at once. In a tf.Graph
    nobody would run it, or each step would.

    Args:
        who: The class of the optimizer.
        ops: What was added to the tf.Graph while it was built.
    """
    added, initialized = set(ops), set()
    for op, handle in find_writes(ops):
        if handle.op in added and handle.op not in initialized:
            initialized.add(handle.op)  # each variable's first write is its initializer
            continue
        raise errors.ContextError(
            errors.compose(
                f"the optimizer {who} assigns to variable {handle.op.name} while it "
                f"is built ({op.type}): in a tf.Graph, no session would run that once.",
                [f"at {errors.line_of(op)}"],
                "use it eagerly or in a tf.function, where it is built once; or take "
                "an optimizer that does not.",
            )
        )
