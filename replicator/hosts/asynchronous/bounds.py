# SPDX-License-Identifier: Apache-2.0
"""The staleness bounds that strategies set for asynchronous programs."""

from __future__ import annotations

from replicator import errors
from replicator.strategy.builder import Builder
from replicator.strategy.builders.ps import PS
from replicator.strategy.builders.ps_load_balancing import PSLoadBalancing
from replicator.strategy.rules import Rules


def staleness(strategy: Builder | None) -> int | None:
    """Returns how many steps programs may be apart; None if there is no bound.

    Args:
        strategy: The strategy of the Replicator.

    Raises:
        StrategyError: The strategy is for programs that one process builds.
    """
    if strategy is None:
        return None
    rules = strategy.rules if isinstance(strategy, Rules) else {"": strategy}
    bounds = []
    for builder in rules.values():
        is_asynchronous = isinstance(builder, PS) and (
            builder.staleness or not builder.sync
        )
        if type(builder) not in (PS, PSLoadBalancing) or not is_asynchronous:
            raise errors.StrategyError(
                f"{type(builder).__name__} cannot be used where programs train the "
                "same variables, each at its own speed.",
                fix="in asynchronous mode, pass PS(sync=False), or PS(staleness=k).",
            )
        assert isinstance(builder, PS)
        bounds.append(builder.staleness)
    return min(filter(None, bounds), default=None)
