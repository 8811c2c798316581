# SPDX-License-Identifier: Apache-2.0
"""Auto: for each variable, what is predicted to take the least time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from replicator import arguments, errors
from replicator.strategy import predictions
from replicator.strategy.builder import Builder
from replicator.strategy.builders.loads import Loads
from replicator.strategy.facts import Resources, VariableFacts, sparse_if_known
from replicator.strategy.nodes import (
    AllReduceSynchronizer,
    Node,
    PSSynchronizer,
    error,
    even_sizes,
)


class Auto(Builder):
    """Each variable is kept equal in the way that is predicted to take the least time.

    On all replicas, with the cheapest all-reduce; on one replica, where its gradients
    are reduced and it is updated once for all; or in parts, one for each replica. Each
    is predicted from what work costs on these devices (see `python -m
    replicator.calibrate`): the bytes and messages of gradients and of values that are
    read, and the optimizer's work, on one replica or on all. The prediction is in the
    nodes, and so in `print(repl.strategy)`.

    Where it matters whether a gradient is sparse, that is waited for: it decides when
    the first step is built, on this and on all later variables, which are then whole.

    Example:
        >>> from replicator import strategy
        >>> facts = [strategy.VariableFacts("w", (2, 2), "float32", nbytes=16)]
        >>> devices = strategy.Resources(("CPU:0", "CPU:1"))
        >>> node = strategy.Auto().build(facts, devices).node("w")
        >>> node.synchronizer.reduction_destination, node.seconds > 0
        ('CPU:0', True)

    Args:
        slots: How many numbers the optimizer keeps for each of a variable's: 2 for
            Adam, 1 with momentum, 0 for plain SGD.
        rows: What share of a variable's rows the gradient of one replica has, where it
            is sparse.

    Raises:
        StrategyError: An option has a value that it cannot have.
    """

    def __init__(self, slots: int = 2, rows: float = 0.01) -> None:
        if not arguments.is_whole(slots, 0, _MOST_SLOTS):
            raise error(
                f"Auto was given slots={errors.shown(slots)}.",
                f"it is an int from 0 to {_MOST_SLOTS}: 2 for Adam, 0 for plain SGD.",
            )
        if not _is_share(rows):
            raise error(
                f"Auto was given rows={errors.shown(rows)}.",
                "it is a share of a variable's rows: more than 0, at most 1.",
            )
        self.slots = slots
        self.rows = float(rows)

    @property
    def assumed(self) -> predictions.Assumed:
        """What its predictions take for granted of steps.

        Example:
            >>> replicator.strategy.Auto(slots=1).assumed.slots
            1
        """
        return predictions.Assumed(self.slots, self.rows)

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes with the least predicted time; see `Builder.nodes`."""
        loads, last = Loads(resources.devices), ""
        for variable in variables:
            # A bias is where its layer's weights are.
            beside = last if len(variable.shape) < 2 else ""
            owner = beside or loads.lowest()
            node = self._best(variable, owner, resources)
            last = ""
            if isinstance(node.synchronizer, PSSynchronizer):
                last = node.synchronizer.reduction_destination
                loads.add(last, variable.nbytes)
            for part, size in zip(node.parts, node.sizes, strict=True):
                assert isinstance(part.synchronizer, PSSynchronizer), "as made here"
                row = variable.nbytes // variable.shape[0]
                loads.add(part.synchronizer.reduction_destination, row * size)
            yield node

    def _best(self, variable: VariableFacts, owner: str, resources: Resources) -> Node:
        """Returns the node of the least time, by the gradient's layout if that counts.

        Args:
            variable: The variable.
            owner: Which replica would own it.
            resources: The devices.
        """
        made = _candidates(variable, owner, resources)
        sparse = sparse_if_known(variable)
        if len(variable.shape) != 2:
            sparse = bool(sparse)  # tables have two axes
        if sparse is not None:
            return self._least(made, variable, resources, sparse)
        dense, rows = (self._least(made, variable, resources, s) for s in _LAYOUTS)
        same = self._least([n for n in made if n == dense], variable, resources, True)
        if (same.seconds or 0.0) <= (rows.seconds or 0.0):
            return dense
        # To ask is to wait for the first step, where it is not known.
        return rows if variable.sparse else dense

    def _least(
        self,
        made: Sequence[Node],
        variable: VariableFacts,
        resources: Resources,
        sparse: bool,
    ) -> Node:
        """Returns the first of the nodes that take the least time."""
        facts = variable.shape, variable.nbytes, resources, sparse, self.assumed
        costed = [predictions.predicted(node, *facts) for node in made]
        return min(costed, key=lambda node: node.seconds or 0.0)


_LAYOUTS = (False, True)  # of gradients: dense, sparse
_MOST_SLOTS = 100


def _candidates(
    variable: VariableFacts, owner: str, resources: Resources
) -> list[Node]:
    """Returns in which ways a variable may be kept equal."""
    path = variable.path
    found = [Node(path, AllReduceSynchronizer())]
    if resources.num_replicas == 1 or not resources.one_program:
        return found
    found.append(Node(path, PSSynchronizer(owner)))
    count = min(resources.num_replicas, variable.shape[0] if variable.shape else 0)
    if count > 1 and not variable.whole:
        servers = [PSSynchronizer(name) for name in resources.devices[:count]]
        sizes = even_sizes(variable.shape[0], count)
        found.append(Node.in_parts(path, 0, sizes, servers))
    return found


def _is_share(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= 1  # a NaN is neither
