# SPDX-License-Identifier: Apache-2.0
"""linked: a loss that depends on the replica's sends, so that gradients come back."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.primitives import base, flows


def linked(loss: Any) -> tf.Tensor:
    """Returns the loss, now dependent on everything this replica has sent so far.

    The sum of all replicas' losses is differentiated, but a tape visits only what the
    replica's own loss depends on. That excludes every `send`, and every `reduce` or
    `gather` whose root is another replica, so no gradient would come back from them.
    Through the linked loss, it does.

    It covers sends in the graph where it is called and in the enclosing graphs. A
    branch, loop body or function that sends must return a linked tensor of its own, on
    which the loss then depends.

    Example:
        >>> def step_fn():
        ...     x = tf.constant(3.0)
        ...     with tf.GradientTape() as tape:
        ...         tape.watch(x)
        ...         total = repl.reduce(x * x)  # None on replica 1
        ...         loss = repl.linked(0.0) if total is None else total
        ...     return tape.gradient(loss, x)  # without linked: None on replica 1
        >>> [float(gradient) for gradient in repl.run(step_fn)]
        [6.0, 6.0]

    Args:
        loss: A floating tensor of any shape; 0.0 on a replica without a loss.

    Returns:
        The same value, of the loss's dtype and shape.

    Raises:
        ArgumentError: The loss is not a floating tensor.
        ContextError: Called outside a step.
    """
    replica = context.require("linked")
    loss, *more = base.flatten(loss, "linked") or [None]
    if more or not isinstance(loss, tf.Tensor) or not flows.is_differentiable(loss):
        raise base.bad_argument(
            "linked",
            f"was given {errors.repr_of(loss)}",
            "pass one tensor of floating numbers.",
        )
    graphs = {tf.compat.v1.get_default_graph()}
    while outer := {getattr(graph, "outer_graph", None) for graph in graphs} - graphs:
        graphs |= outer
    for receipt in replica.states.of(flows.Receipts):
        if receipt.graph in graphs:
            loss += tf.cast(receipt, loss.dtype)
    return loss
