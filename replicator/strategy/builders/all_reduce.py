# SPDX-License-Identifier: Apache-2.0
"""AllReduce: every variable on every replica, with all-reduced gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from replicator.strategy.builder import Builder, check_chunks
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node
from replicator.variables.synchronizer import (
    AllReduceSynchronizer,
    check_compressor,
    check_spec,
)


class AllReduce(Builder):
    """Mirrors every variable on all replicas and all-reduces the gradients.

    Example:
        >>> repl = replicator.Replicator(
        ...     ["CPU:0", "CPU:1"], strategy=replicator.strategy.AllReduce())
        >>> with repl.context():
        ...     v = tf.Variable([1.0, 2.0])
        >>> [c.device == repl.devices[r] for r, c in enumerate(v.components)]
        [True, True]

    Args:
        chunk_size: The number of variables, in the order of creation, whose small
            gradients share a bucket.
        all_reduce_spec: "NCCL": NVIDIA's library where all replicas are on whole GPUs
            of one host, else as "AUTO": the cheapest algorithm; or "RING".
        compressor: Compresses gradients in transit; None for none.

    Raises:
        StrategyError: An option has an invalid value.
    """

    def __init__(
        self,
        chunk_size: int = 128,
        all_reduce_spec: str = "NCCL",
        compressor: Any = None,
    ) -> None:
        name, compressor = type(self).__name__, "" if compressor is None else compressor
        check_chunks(self, chunk_size)
        check_spec(name, all_reduce_spec)
        check_compressor(name, compressor)
        self.chunk_size = chunk_size
        self.all_reduce_spec = all_reduce_spec
        self.compressor = compressor

    def of(self, index: int) -> AllReduceSynchronizer:
        """Returns the synchronizer of the variable, or the part, with an index.

        Example:
            >>> replicator.strategy.AllReduce(chunk_size=2).of(5).group
            2

        Args:
            index: The index among all variables, or parts, in the order of creation.
        """
        group = index // self.chunk_size
        return AllReduceSynchronizer(self.all_reduce_spec, self.compressor, group)

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes in groups; see `Builder.nodes`."""
        for index, variable in enumerate(variables):
            yield Node(variable.path, self.of(index))
