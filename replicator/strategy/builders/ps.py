# SPDX-License-Identifier: Apache-2.0
"""PS and PSLoadBalancing: whole variables, on one device or spread over several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from replicator.strategy.builder import Builder
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node
from replicator.variables.default_placement import Loads
from replicator.variables.synchronizer import PSSynchronizer, check_compressor, check_ps


class PS(Builder):
    """Places all variables on the first CPU device, a parameter server.

    Source: Li et al. 2014, Scaling distributed machine learning with the parameter
    server; this and the other builders are those of AutoDist.

    Example:
        >>> repl = replicator.Replicator(
        ...     ["CPU:0", "CPU:1"], strategy=replicator.strategy.PS())
        >>> with repl.context():
        ...     v = tf.Variable([1.0, 2.0])
        >>> v.components[1].device == repl.devices[0]
        True

    Args:
        local_proxy_variable: Whether each replica has a copy, refreshed after each
            update, instead of reading the variable where it is.
        sync: Whether an update waits for the gradients of all replicas.
        staleness: How many steps the fastest replica may be ahead of the slowest.
        compressor: Compresses gradients in transit; None for none.

    Raises:
        StrategyError: The options are invalid or contradict each other.
    """

    def __init__(
        self,
        local_proxy_variable: bool = False,
        sync: bool = True,
        staleness: int = 0,
        compressor: Any = None,
    ) -> None:
        name, compressor = type(self).__name__, "" if compressor is None else compressor
        check_ps(name, local_proxy_variable, sync, staleness)
        check_compressor(name, compressor)
        self.local_proxy_variable = local_proxy_variable
        self.sync = sync
        self.staleness = staleness
        self.compressor = compressor

    def on(self, device: str) -> PSSynchronizer:
        """Returns the synchronizer for variables on a device.

        Example:
            >>> replicator.strategy.PS().on("CPU:1").reduction_destination
            'CPU:1'

        Args:
            device: The name of the device, as in `Resources.cpus`.
        """
        return PSSynchronizer(
            device,
            self.local_proxy_variable,
            self.sync,
            self.staleness,
            self.compressor,
        )

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes on the first CPU device; see `Builder.nodes`."""
        for variable in variables:
            yield Node(variable.path, self.on(resources.cpus[0]))


class PSLoadBalancing(PS):
    """Places each variable on the CPU device with the fewest bytes so far.

    Takes the arguments of `PS`.

    Example:
        >>> repl = replicator.Replicator(
        ...     ["CPU:0", "CPU:1"], strategy=replicator.strategy.PSLoadBalancing())
        >>> with repl.context():
        ...     v, w = tf.Variable([1.0, 2.0]), tf.Variable([3.0])
        >>> [x.owner for x in (v, w)]
        [0, 1]
    """

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes on the least loaded CPU devices; see `Builder.nodes`."""
        loads = Loads(resources.cpus)
        for variable in variables:
            yield Node(variable.path, self.on(loads.least(variable.nbytes)))
