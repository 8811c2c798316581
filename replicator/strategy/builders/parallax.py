# SPDX-License-Identifier: Apache-2.0
"""Parallax: dense gradients are all-reduced, sparse ones go to parameter servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from replicator.strategy.builders.all_reduce import AllReduce
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node
from replicator.variables.default_placement import Loads
from replicator.variables.synchronizer import PSSynchronizer, check_ps


class Parallax(AllReduce):
    """Dense gradients as by AllReduce, sparse as by PSLoadBalancing, without copies.

    Which gradients are sparse is known when the first step with them is built.

    Source: Kim et al. 2019, Parallax: sparsity-aware data parallel training of deep
    neural networks.

    Example:
        >>> from replicator.strategy import VariableFacts
        >>> facts = [VariableFacts("embedding", (8, 2), "float32", sparse=True),
        ...          VariableFacts("kernel", (2, 2), "float32", sparse=False)]
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> built = replicator.strategy.Parallax().build(facts, devices)
        >>> [type(node.synchronizer).__name__ for node in built.nodes]
        ['PSSynchronizer', 'AllReduceSynchronizer']

    Args:
        chunk_size: As for `AllReduce`.
        local_proxy_variable: Accepted as in AutoDist, but without effect: variables
            that are read by rows have no copies.
        sync: As for `PS`.
        staleness: As for `PS`.
        all_reduce_spec: As for `AllReduce`.
        compressor: As for `AllReduce`, for dense gradients.

    Raises:
        StrategyError: The options are invalid or contradict each other.
    """

    def __init__(
        self,
        chunk_size: int = 128,
        local_proxy_variable: bool = False,
        sync: bool = True,
        staleness: int = 0,
        all_reduce_spec: str = "NCCL",
        compressor: Any = None,
    ) -> None:
        super().__init__(chunk_size, all_reduce_spec, compressor)
        check_ps(type(self).__name__, local_proxy_variable, sync, staleness)
        self.local_proxy_variable = local_proxy_variable
        self.sync = sync
        self.staleness = staleness

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes by whether gradients are sparse; see `Builder.nodes`."""
        loads, dense = Loads(resources.cpus), itertools.count()
        for variable in variables:
            if variable.sparse:
                device = loads.least(variable.nbytes)
                synchronizer = PSSynchronizer(device, False, self.sync, self.staleness)
                yield Node(variable.path, synchronizer)
            else:
                yield Node(variable.path, self.of(next(dense)))
