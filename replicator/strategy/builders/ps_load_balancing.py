# SPDX-License-Identifier: Apache-2.0
"""PSLoadBalancing: spreads variables evenly over all CPU devices, by bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from replicator.strategy.builders.ps import PS
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node
from replicator.variables.default_placement import Loads


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
