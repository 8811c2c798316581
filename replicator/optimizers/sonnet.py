# SPDX-License-Identifier: Apache-2.0
"""The adapter for Sonnet 2 optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicator import _tf
from replicator.optimizers import checks, parts
from replicator.optimizers.wrapped import Wrapped


class SonnetAdapter(Wrapped):
    """Adapts Sonnet 2 optimizers: any tf.Module with apply(updates, parameters)."""

    @_tf.not_converted
    def apply(
        self, updates: Sequence[Any], parameters: Sequence[Any], weight: Any = None
    ) -> Any:
        """Combines the replicas' updates and applies them.

        Args:
            updates: This replica's gradients; None for a parameter it did not use.
            parameters: The variables, in the same order.
            weight: The weight of this replica's gradients in the mean.
        """
        who = type(self).__name__
        updates = checks.entries(who, "updates", updates)
        parameters = checks.entries(who, "parameters", parameters)
        base_apply = super().apply

        def prepare(_: Sequence[Any]) -> None:
            initialize = getattr(self, "_initialize", None)
            if initialize is not None:
                initialize(parameters)

        def update(own: Any, combined: Sequence[Any], updated: Sequence[Any]) -> Any:
            return (base_apply if own is None else own.apply)(combined, updated)

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
