# SPDX-License-Identifier: Apache-2.0
"""Sharded and Mirrored: the builders of `variables="sharded"` and `"mirrored"`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from replicator.strategy.builder import Builder
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node
from replicator.variables.default_placement import Loads
from replicator.variables.synchronizer import AllReduceSynchronizer, PSSynchronizer


class Sharded(Builder):
    """Places each variable on the replica with the fewest bytes so far.

    Vectors go with the variable before them: a bias with its layer's weights, whose
    gradient is computed from the same values. Scalars are mirrored.

    Source: ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054), whose first two stages
    divide the optimizer's state and the gradients like this.

    Example:
        >>> repl = replicator.Replicator(
        ...     ["CPU:0", "CPU:1"], strategy=replicator.strategy.Sharded())
        >>> with repl.context():
        ...     v, w = tf.Variable([[1.0, 2.0]]), tf.Variable([[3.0]])
        >>> [x.owner for x in (v, w)]
        [0, 1]
    """

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes on the replicas' devices; see `Builder.nodes`."""
        loads = Loads(resources.devices)
        for variable in variables:
            owner = loads.shard(len(variable.shape), variable.nbytes)
            how = AllReduceSynchronizer() if owner is None else PSSynchronizer(owner)
            yield Node(variable.path, how)


class Mirrored(Builder):
    """Mirrors every variable; the cheapest algorithm reduces their gradients.

    Example:
        >>> repl = replicator.Replicator(
        ...     ["CPU:0", "CPU:1"], strategy=replicator.strategy.Mirrored())
        >>> with repl.context():
        ...     v = tf.Variable([[1.0, 2.0]])
        >>> print(v.owner)
        None
    """

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes of a single group; see `Builder.nodes`."""
        for variable in variables:
            yield Node(variable.path, AllReduceSynchronizer())
