# SPDX-License-Identifier: Apache-2.0
"""The adapter for tf.compat.v1.train optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import autograph
from replicator.optimizers import checks, parts
from replicator.optimizers.wrapped import LaterSlots
from replicator.primitives import base
from replicator.variables.replicated import plain


class V1Adapter(LaterSlots):
    """Adapts optimizers of tf.compat.v1.train."""

    @autograph.not_converted
    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: Any = None,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        *,
        weight: Any = None,
    ) -> Any:
        """Combines the replicas' gradients and applies them.

        Args:
            grads_and_vars: Pairs of this replica's gradient and its variable.
            global_step: Incremented once per step, if given.
            name: The name of the returned op.
            skip_gradients_aggregation: Refused in a step if it is True.
            weight: The weight of this replica's gradients in the mean.

        Returns:
            The op that updates this replica's components.
        """
        grads, variables = checks.pairs(type(self).__name__, grads_and_vars)
        if global_step is not None and not isinstance(plain(global_step), tf.Variable):
            raise base.bad_argument(
                type(self).__name__,
                f"was given global_step={errors.repr_of(global_step)}",
                "the global step is a variable of integers, or None.",
            )
        if context.current() is not None:
            skips = {"skip_gradients_aggregation": skip_gradients_aggregation}
            checks.refuse_combined(type(self).__name__, skips)
        base_apply = super().apply_gradients

        def prepare(used: Sequence[Any]) -> None:
            with tf.init_scope():
                self._create_slots(used)

        def update(
            part_optimizer: Any, combined: Sequence[Any], updated: Sequence[Any]
        ) -> Any:
            pairs = list(zip(combined, updated, strict=True))
            apply = (
                base_apply if part_optimizer is None else part_optimizer.apply_gradients
            )
            if global_step is None:
                return apply(pairs, name=name)
            # TensorFlow would count by the type of the variable, and put the result for
            # any type but its own into a collection that compares by value.
            with tf.control_dependencies([apply(pairs)]):
                return global_step.assign_add(1, name=name, read_value=False)

        return self._combined(grads, variables, weight, prepare, update)

    def _expanded(
        self, state: dict[str, Any], division: parts.Division
    ) -> dict[str, Any]:
        return parts.expand_slots(self, state, division)
