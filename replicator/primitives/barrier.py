# SPDX-License-Identifier: Apache-2.0
"""barrier: effects before it precede effects after it, on all replicas.

Meaning: all effects (writes and reads of variables, prints, Python calls) that any
replica's code has before its barrier happen before all effects that any replica's code
has after it. Dual: none, since no tensor flows. Lowering: nothing is computed;
graph/lowering/fence.py orders the effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.graph.ir.placeholder import Placeholder, PrimitiveFacts
from replicator.graph.lowering.matched import Matched
from replicator.primitives import base, groups

FACTS = PrimitiveFacts(algorithm="order", orders_effects=True)


def barrier(group: Any = None) -> None:
    """Orders effects: those before it, on any replica, come before those after it.

    Effects are writes and reads of variables, prints, assertions and Python calls. Pure
    computation is ordered by its data alone.

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
        ArgumentError: `group` is invalid or lacks the calling replica.
        ContextError: Called outside a step.
        MismatchError: When the step is built: not all replicas of the group call it.
    """
    members = groups.members("barrier", group)
    base.communicate("barrier", {}, [], [], group=members, differentiable=False)


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Returns no gradients, since there are no operands."""
    del placed, upstream
    return []


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Returns no results for any replica."""
    return [[] for _ in matched.calls]
