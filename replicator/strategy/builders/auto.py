# SPDX-License-Identifier: Apache-2.0
"""Auto: gives each variable the placement with the least predicted time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from replicator import arguments, errors
from replicator.strategy import predictions
from replicator.strategy.builder import Builder
from replicator.strategy.facts import Resources, VariableFacts, sparse_if_known
from replicator.strategy.nodes import Node, even_sizes
from replicator.variables.default_placement import Loads
from replicator.variables.synchronizer import (
    AllReduceSynchronizer,
    PSSynchronizer,
    error,
)


class Auto(Builder):
    """Gives each variable the placement that is predicted to take the least time.

    Either mirrored, with the cheapest all-reduce; or owned by one replica, which
    reduces its gradients and updates it once for all; or split into one part per
    replica. Predictions use what work costs on these devices (see `python -m
    replicator.calibrate`): the bytes and messages of gradients and of values that are
    read, and the optimizer's work, on one replica or on all. They are stored in the
    nodes, so `print(repl.strategy)` shows them.

    Where the choice depends on whether a gradient is sparse, Auto waits: it then
    decides on this and all later variables when the first step is built, and leaves
    them whole.

    Example:
        >>> from replicator import strategy
        >>> facts = [strategy.VariableFacts("w", (2, 2), "float32", nbytes=16)]
        >>> devices = strategy.Resources(("CPU:0", "CPU:1"))
        >>> node = strategy.Auto().build(facts, devices).node("w")
        >>> node.synchronizer.reduction_destination, node.seconds > 0
        ('CPU:0', True)

    Args:
        slots: The optimizer's number of slots per variable: 2 for Adam, 1 with
            momentum, 0 for plain SGD.
        rows: The share of a variable's rows in one replica's sparse gradient.

    Raises:
        StrategyError: An option has an invalid value.
    """

    def __init__(self, slots: int = 2, rows: float = 0.01) -> None:
        if not arguments.is_whole(slots, 0, _MOST_SLOTS):
            raise error(
                f"Auto was given slots={errors.repr_of(slots)}.",
                f"it is an int from 0 to {_MOST_SLOTS}: 2 for Adam, 0 for plain SGD.",
            )
        if not _is_share(rows):
            raise error(
                f"Auto was given rows={errors.repr_of(rows)}.",
                "it is a share of a variable's rows: more than 0, at most 1.",
            )
        self.slots = slots
        self.rows = float(rows)

    @property
    def assumed(self) -> predictions.Assumed:
        """What its predictions assume about steps.

        Example:
            >>> replicator.strategy.Auto(slots=1).assumed.slots
            1
        """
        return predictions.Assumed(self.slots, self.rows)

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes with the least predicted time; see `Builder.nodes`."""
        loads, last_owner = Loads(resources.devices), ""
        for variable in variables:
            # A bias goes with its layer's weights.
            neighbor = last_owner if len(variable.shape) < 2 else ""
            owner = neighbor or loads.lowest()
            node = self._best(variable, owner, resources)
            last_owner = ""
            if isinstance(node.synchronizer, PSSynchronizer):
                last_owner = node.synchronizer.reduction_destination
                loads.add(last_owner, variable.nbytes)
            for part, size in zip(node.parts, node.sizes, strict=True):
                assert isinstance(part.synchronizer, PSSynchronizer), "as made here"
                row = variable.nbytes // variable.shape[0]
                loads.add(part.synchronizer.reduction_destination, row * size)
            yield node

    def _best(self, variable: VariableFacts, owner: str, resources: Resources) -> Node:
        """Returns the fastest node, asking for the gradient's layout only if needed.

        Args:
            variable: The variable.
            owner: The replica that would own it.
            resources: The devices.
        """
        nodes = _candidates(variable, owner, resources)
        sparse = sparse_if_known(variable)
        if len(variable.shape) != 2:
            sparse = bool(sparse)  # embedding tables have two axes
        if sparse is not None:
            return self._least(nodes, variable, resources, sparse)
        dense, rows = (self._least(nodes, variable, resources, s) for s in _LAYOUTS)
        if_sparse = self._least(
            [n for n in nodes if n == dense], variable, resources, True
        )
        if (if_sparse.seconds or 0.0) <= (rows.seconds or 0.0):
            return dense
        # If the layout is still unknown, asking for it waits for the first step.
        return rows if variable.sparse else dense

    def _least(
        self,
        made: Sequence[Node],
        variable: VariableFacts,
        resources: Resources,
        sparse: bool,
    ) -> Node:
        """Returns the first of the nodes with the least predicted time."""
        facts = variable.shape, variable.nbytes, resources, sparse, self.assumed
        costed = [predictions.predicted(node, *facts) for node in made]
        return min(costed, key=lambda node: node.seconds or 0.0)


_LAYOUTS = (False, True)  # of gradients: dense, sparse
_MOST_SLOTS = 100


def _candidates(
    variable: VariableFacts, owner: str, resources: Resources
) -> list[Node]:
    """Returns the possible nodes of a variable."""
    path = variable.path
    nodes = [Node(path, AllReduceSynchronizer())]
    if resources.num_replicas == 1 or not resources.one_program:
        return nodes
    nodes.append(Node(path, PSSynchronizer(owner)))
    count = min(resources.num_replicas, variable.shape[0] if variable.shape else 0)
    if count > 1 and not variable.whole:
        servers = [PSSynchronizer(name) for name in resources.devices[:count]]
        sizes = even_sizes(variable.shape[0], count)
        nodes.append(Node.in_parts(path, 0, sizes, servers))
    return nodes


def _is_share(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= 1  # a NaN is neither
