# SPDX-License-Identifier: Apache-2.0
"""barrier: what is before it happens before what is behind it, everywhere.

Meaning: all effects (writes and reads of variables, prints, Python calls) that any
replica's code has before its barrier happen before all that any replica's code has
behind it. Dual: none, nothing flows. Lowering: nothing is computed;
graph/lowering/fence.py puts the effects in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.graph.ir.placeholder import Facts, Placeholder
from replicator.graph.lowering.matched import Matched
from replicator.primitives import base, groups

FACTS = Facts(algorithm="order", orders_effects=True)


def barrier(group: Any = None) -> None:
    """Orders effects: those before it, on any replica, come before those after it.

    Effects are writes and reads of variables, prints, assertions and Python calls. What
    only computes is ordered by its data alone.

    Example:
        >>> order = []
        >>> def step_fn():
        ...     tf.py_function(lambda: order.append("before"), [], [])
        ...     repl.barrier()
        ...     tf.py_function(lambda: order.append("after"), [], [])
        >>> _ = repl.run(step_fn)
        >>> order
        ['before', 'before', 'after', 'after']

    Args:
        group: The participating replicas, from `Replicator.group` or `groups`; all by
            default. The calling replica must be a member.

    Raises:
        ArgumentError: `group` is no group, or one without the calling replica.
        ContextError: Called outside a step.
        MismatchError: When the step is built: not all replicas of the group call it.
    """
    members = groups.members("barrier", group)
    base.communicate("barrier", {}, [], [], group=members, differentiable=False)


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Returns nothing: no operand, no gradient."""
    del placed, upstream
    return []


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Hands nothing to anyone."""
    return [[] for _ in matched.calls]
