# SPDX-License-Identifier: Apache-2.0
"""The adapter for Sonnet 2 optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicator._tf import autograph
from replicator.optimizers import checks, overrides, parts
from replicator.optimizers.wrapped import Wrapped


class SonnetAdapter(Wrapped):
    """Adapts Sonnet 2 optimizers: any tf.Module with apply(updates, parameters)."""

    @autograph.not_converted
    def apply(
        self,
        updates: Sequence[Any],
        parameters: Sequence[Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Combines the replicas' updates and applies them.

        Args:
            updates: This replica's gradients; None for a parameter it did not use.
            parameters: The variables, in the same order.
            *args: As for the optimizer, if its class takes more.
            **options: The same. `weight` is the weight of this replica's gradients in
                the mean.
        """
        base_apply = super().apply
        weight, args, options = overrides.weight_of(base_apply, 2, args, options)
        who = type(self).__name__
        updates = checks.entries(who, "updates", updates)
        parameters = checks.entries(who, "parameters", parameters)

        def prepare(_: Sequence[Any]) -> None:
            initialize = getattr(self, "_initialize", None)
            if initialize is not None:
                initialize(parameters)

        def update(
            part_optimizer: Any, combined: Sequence[Any], updated: Sequence[Any]
        ) -> Any:
            apply = base_apply if part_optimizer is None else part_optimizer.apply
            return apply(combined, updated, *args, **options)

        return self._combined(updates, parameters, weight, prepare, update)

    def _expanded(
        self, state: dict[str, Any], division: parts.Division
    ) -> dict[str, Any]:
        divided = [
            None if pieces[0] is whole else pieces
            for whole, pieces in zip(division.wholes, division.pieces, strict=True)
        ]
        state = parts.expand_lists(state, divided)
        state["_initialize"] = lambda parameters: None  # already done for the wholes
        return state
