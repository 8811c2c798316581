# SPDX-License-Identifier: Apache-2.0
"""Link: a compressor's communication and state, in one call of a replica.

Everything is sent through the primitives, with the policies of the variables concerned:
what only the owner of a variable needs is sent to the owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.compressors.state import State
from replicator.graph.ir.placeholder import NO_POLICY, OperandPolicy
from replicator.primitives import all_gather, all_reduce, all_to_all, base, rooted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link(State):
    """Communicates and holds state for a compressor, on the replica being built.

    `Compressor.reduce` receives one with the tensors that it sums.

    Example:
        >>> from replicator import compressors
        >>> class Rounded(compressors.Compressor):
        ...     def reduce(self, tensors, link):
        ...         sent = [tf.round(tensor) for tensor in tensors]
        ...         return compressors.Sums(link.sum(sent), sent)
        >>> def step_fn():
        ...     return repl.all_reduce(tf.constant([0.8, 2.1]), compressor=Rounded())
        >>> repl.run(step_fn)[0].numpy()
        array([2., 4.], dtype=float32)

    Attributes:
        members: The ids of the participating replicas, in order.
        policies: The variable of each tensor, and the replica that needs it.
        names: One name per tensor, unique within the call.
        place: Holds the variables.
        algorithm: How sums are computed, one of ALGORITHM_NAMES; None: the cheapest.
        keeps_rest: Whether the part that is not sent is kept for later. The received
            totals must then equal the sum of what the replicas report as sent, rounding
            included.
        scale: The loss scale by which the tensors are multiplied, a scalar; or None.
        is_spoilt: Whether any replica's tensors are not finite, a bool or a scalar:
            the step will make no update, or none of use.
    """

    members: tuple[int, ...]
    policies: tuple[OperandPolicy, ...]
    algorithm: str | None = None
    keeps_rest: bool = False
    is_spoilt: tf.Tensor | bool = False

    @property
    def size(self) -> int:
        """The number of participating replicas.

        Example:
            >>> from replicator import compressors
            >>> class Clipped(compressors.Compressor):
            ...     def reduce(self, tensors, link):
            ...         bound = 127 // link.size  # so that the sums fit into 8 bits
            ...         sent = [tf.clip_by_value(x, -bound, bound) for x in tensors]
            ...         totals = link.sum([tf.cast(x, tf.int8) for x in sent])
            ...         return compressors.Sums(
            ...             [tf.cast(x, tf.float32) for x in totals], sent)
            >>> def step_fn():
            ...     x = tf.constant([2.0, 300.0])
            ...     return repl.all_reduce(x, compressor=Clipped())
            >>> repl.run(step_fn)[0].numpy()
            array([  4., 126.], dtype=float32)
        """
        return len(self.members)

    def of(self, places: Sequence[int]) -> Link:
        """Returns a link for a subset of the tensors.

        Example:
            >>> from replicator import compressors
            >>> class SmallExactly(compressors.Compressor):
            ...     def reduce(self, tensors, link):
            ...         (large, small), half = tensors, compressors.BF16()
            ...         sums = half.reduce([large], link.of([0]))
            ...         (total,) = link.of([1]).sum([small])
            ...         return compressors.Sums(
            ...             [*sums.totals, total], [*sums.sent, small])
            >>> def step_fn():
            ...     return repl.all_reduce(
            ...         [tf.ones([8]), tf.constant(0.5)], compressor=SmallExactly())
            >>> [float(tf.reduce_sum(x[0])) for x in repl.run(step_fn)]
            [16.0, 1.0]

        Args:
            places: The indices of the tensors; index k of the new link is `places[k]`
                of this one.
        """
        return dataclasses.replace(
            self,
            policies=tuple(self.policies[k] for k in places),
            names=tuple(self.names[k] for k in places),
        )

    def sum(
        self, tensors: Sequence[tf.Tensor], of: Sequence[int | None] | None = None
    ) -> list[tf.Tensor]:
        """Sums tensors over the replicas.

        16-bit floats are summed in float32, and the sum is rounded.

        Example:
            >>> from replicator import compressors
            >>> class Means(compressors.Compressor):
            ...     def reduce(self, tensors, link):
            ...         means = [tf.reduce_mean(x) for x in tensors]
            ...         shapes = [x.shape for x in tensors]
            ...         totals = map(tf.fill, shapes, link.sum(means))
            ...         sent = map(tf.fill, shapes, means)
            ...         return compressors.Sums([*totals], [*sent])
            >>> def step_fn():
            ...     return repl.all_reduce(tf.constant([1.0, 5.0]), compressor=Means())
            >>> repl.run(step_fn)[0].numpy()
            array([6., 6.], dtype=float32)

        Args:
            tensors: Any number of them, of the same shapes and dtypes on all replicas;
                each may represent its tensor by a smaller one.
            of: The index of the tensor that each represents, in order by default; None
                for what all replicas need.

        Returns:
            The sums, of the shapes and dtypes of `tensors`; those that only one replica
            needs are computed for that replica alone.
        """
        return all_reduce.reduce_dense(
            list(tensors),
            "sum",
            group=self.members,
            policies=[self._policy(k) for k in self._places(tensors, of)],
            algorithm=self.algorithm,
        )

    def gather(self, payloads: Sequence[Any]) -> list[Any]:
        """Returns the replicas' payloads of each tensor, stacked in replica order.

        Example:
            >>> from replicator import compressors
            >>> class Median(compressors.Compressor):
            ...     def reduce(self, tensors, link):
            ...         gathered = link.gather(tensors)  # x: [replicas, *shape]
            ...         middle = [tf.sort(x, axis=0)[link.size // 2] for x in gathered]
            ...         return compressors.Sums(middle, tensors)
            >>> def step_fn():
            ...     x = tf.constant([1.0, 2.0]) * repl.replica_id
            ...     return repl.all_reduce(x, compressor=Median())
            >>> repl.run(step_fn)[0].numpy()
            array([1., 2.], dtype=float32)

        Args:
            payloads: A nest of tensors for each tensor of the call; of the same shapes
                and dtypes on all replicas.

        Returns:
            The same nests; a tensor of shape [...] becomes one of shape [replicas,
            ...].
        """
        leaves = [tf.nest.flatten(payload) for payload in payloads]
        policies = [self._policy(k) for k, nest in enumerate(leaves) for _ in nest]
        flat = base.flatten([leaf for nest in leaves for leaf in nest], "a compressor")
        gathered = iter(
            all_gather.gather_dense(flat, None, group=self.members, policies=policies)
        )
        return [
            tf.nest.pack_sequence_as(payload, [next(gathered) for _ in nest])
            for payload, nest in zip(payloads, leaves, strict=True)
        ]

    def exchange(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends the n-th row of each tensor to the n-th replica.

        Example:
            >>> from replicator import compressors
            >>> class InParts(compressors.Compressor):  # each replica sums one part
            ...     def reduce(self, tensors, link):
            ...         rows = [tf.reshape(x, [link.size, -1]) for x in tensors]
            ...         parts = [tf.reduce_sum(x, 0) for x in link.exchange(rows)]
            ...         shapes = [x.shape for x in tensors]
            ...         totals = map(tf.reshape, link.collect(parts), shapes)
            ...         return compressors.Sums([*totals], tensors)
            >>> def step_fn():
            ...     return repl.all_reduce(tf.range(4.0), compressor=InParts())
            >>> repl.run(step_fn)[0].numpy()
            array([0., 2., 4., 6.], dtype=float32)

        Args:
            tensors: Tensors of shape [replicas, ...], of the same shapes and dtypes on
                all replicas.

        Returns:
            The rows that the replicas sent to this one, in replica order: tensors of
            the same shapes and dtypes.
        """
        return all_to_all.exchange(list(tensors), 0, 0, None, group=self.members)

    def collect(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns all replicas' tensors, stacked in replica order, on all of them.

        Each replica broadcasts its tensors once. Replicas built as copies cannot be the
        roots of different broadcasts, so theirs are gathered.

        Example:
            >>> from replicator import compressors
            >>> class Largest(compressors.Compressor):  # on any replica
            ...     def reduce(self, tensors, link):
            ...         largest = [tf.reduce_max(x, 0) for x in link.collect(tensors)]
            ...         return compressors.Sums(largest, tensors)
            >>> def step_fn():
            ...     x = tf.constant([1.0, 2.0]) * (1 - repl.replica_id)
            ...     return repl.all_reduce(x, compressor=Largest())
            >>> repl.run(step_fn)[1].numpy()
            array([1., 2.], dtype=float32)

        Args:
            tensors: Of the same dtypes and shapes on all replicas.

        Returns:
            Tensors of shape [replicas, ...] for tensors of shape [...].
        """
        build = context.require("a compressor").build
        if not build.all_traced:
            return all_gather.gather_dense(list(tensors), None, group=self.members)
        received = [
            base.communicate(
                "broadcast",
                {"root": member},
                list(tensors),
                rooted.values(tensors),
                agreed=rooted.values(tensors),
                group=self.members,
                differentiable=False,
            )
            for member in self.members
        ]
        return [tf.stack(parts) for parts in zip(*received, strict=True)]

    def _places(
        self, tensors: Sequence[Any], of: Sequence[int | None] | None
    ) -> Sequence[int | None]:
        return range(len(tensors)) if of is None else of

    def _policy(self, k: int | None) -> OperandPolicy:
        return NO_POLICY if k is None else self.policies[k]
