# SPDX-License-Identifier: Apache-2.0
"""Fixed: a builder that returns an existing strategy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from replicator.strategy.builder import Builder
from replicator.strategy.description import Strategy
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node


class Fixed(Builder):
    """Looks up each variable's node in a Strategy, by its path.

    Example:
        >>> empty = replicator.strategy.Strategy()
        >>> repl = replicator.Replicator(["CPU:0", "CPU:1"], strategy=empty)

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields the strategy's nodes; see `Builder.nodes`."""
        nodes = self.strategy.by_name
        for variable in variables:
            yield nodes.get(variable.path)

    def missing(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Returns the nodes without a variable.

        Example:
            >>> ps = replicator.strategy.PSSynchronizer("CPU:0")
            >>> nodes = (replicator.strategy.Node("w", ps),)
            >>> from replicator.strategy.builders.fixed import Fixed
            >>> Fixed(replicator.strategy.Strategy(nodes)).missing(["v"])
            ('w',)
        """
        return tuple(name for name in self.strategy.by_name if name not in set(paths))

    def __repr__(self) -> str:
        return f"Strategy({self.strategy.id})"
