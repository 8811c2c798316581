# SPDX-License-Identifier: Apache-2.0
"""Link: a compressor's communication and state, in one call of a replica.

Everything is sent through the primitives, with the policies of the variables concerned:
what only the owner of a variable needs is sent to the owner.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.compressors.memory import Place, Residual
from replicator.graph.ir.placeholder import NO_POLICY, OperandPolicy
from replicator.primitives import all_gather, all_reduce, all_to_all, base, rooted


@dataclasses.dataclass(frozen=True)
class Link:
    """Communicates and holds state for a compressor, on the replica being built.

    Attributes:
        members: The participating replicas, in order.
        policies: The variable of each tensor, and the replica that needs it.
        names: One name per tensor, unique within the call.
        place: Where variables are kept.
        algorithm: How sums are computed, one of ALGORITHM_NAMES; None: the cheapest.
        keeps_rest: Whether the part that is not sent is kept. The received totals must
            then equal the sum of what the replicas report as sent, rounding included.
        scale: The loss scale by which the tensors are multiplied, or None.
        is_spoilt: Whether any replica's tensors are not finite: the step will make no
            update, or none of use.
    """

    members: tuple[int, ...]
    policies: tuple[OperandPolicy, ...]
    names: tuple[str, ...]
    place: Place
    algorithm: str | None = None
    keeps_rest: bool = False
    scale: tf.Tensor | None = None
    is_spoilt: tf.Tensor | bool = False

    @property
    def size(self) -> int:
        """The number of participating replicas."""
        return len(self.members)

    def of(self, places: Sequence[int]) -> Link:
        """Returns the link for some of the tensors."""
        return dataclasses.replace(
            self,
            policies=tuple(self.policies[k] for k in places),
            names=tuple(self.names[k] for k in places),
        )

    def feeding_back(self) -> Link:
        """Returns the link for a compressor under error feedback."""
        return dataclasses.replace(self, keeps_rest=True)

    # --- Communication ----------------------------------------------------------------

    def sum(
        self, tensors: Sequence[tf.Tensor], of: Sequence[int | None] | None = None
    ) -> list[tf.Tensor]:
        """Sums tensors over the replicas.

        16-bit floats are summed in float32, and the sum is rounded.

        Args:
            tensors: Any number of them; each may be a smaller stand-in for its tensor.
            of: The index of the tensor that each stands for, in order by default; None
                for what all replicas need.
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

        Args:
            payloads: A nest of tensors for each tensor of the call.
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

        Args:
            tensors: Tensors with as many rows as there are replicas.

        Returns:
            The rows that the replicas sent to this one, in replica order.
        """
        return all_to_all.exchange(list(tensors), 0, 0, None, group=self.members)

    def collect(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns all replicas' tensors, stacked in replica order, on all of them.

        Each replica broadcasts its tensors once. Replicas built as copies cannot be the
        roots of different broadcasts, so theirs are gathered.

        Args:
            tensors: Of the same dtypes and shapes on all replicas.
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

    # --- State ------------------------------------------------------------------------

    def residual(self, k: int, like: tf.Tensor) -> Residual:
        """Returns this replica's residual of the k-th tensor.

        Args:
            k: The index of the tensor.
            like: A tensor of its dtype and shape.
        """
        return self.place.residual(f"residual_{self.names[k]}", like)

    def factor(self, k: int, initial: Callable[[], tf.Tensor]) -> tf.Variable:
        """Returns a variable for the k-th tensor, of which each replica has a copy.

        Args:
            k: The index of the tensor.
            initial: Returns the initial value, the same in every run.
        """
        return self.place.factor(f"factor_{self.names[k]}", initial)

    def count(self) -> tf.Tensor:
        """Returns how many times this was called in earlier steps."""
        counter = self.place.counter(f"calls_{self.names[0]}")
        before = counter.read_value()
        self.write(counter, before + 1)
        return before

    def write(self, variable: tf.Variable, value: tf.Tensor) -> None:
        """Assigns a value that is equal on all replicas."""
        replica = context.require("a compressor")
        with replica.equal_updates(self.place.owner):
            variable.assign(value, read_value=False)

    def uniform(self, shape: Any, dtype: tf.DType) -> tf.Tensor:
        """Returns random numbers between 0 and 1, different on each replica.

        A run restored from a checkpoint continues the same sequence.

        Args:
            shape: Their shape.
            dtype: Their dtype.
        """
        name = f"noise_{self.names[0]}"
        seed = zlib.crc32(f"{self.place.owner} {name}".encode())
        return self.place.generator(name, seed).uniform(shape, dtype=dtype)

    def scaled(self, owed: tf.Tensor) -> tf.Tensor:
        """Multiplies a residual by the loss scale of the tensors."""
        return owed if self.scale is None else owed * tf.cast(self.scale, owed.dtype)

    def unscaled(self, owed: tf.Tensor) -> tf.Tensor:
        """Divides a residual by the loss scale, which may be another in later steps."""
        return owed if self.scale is None else owed / tf.cast(self.scale, owed.dtype)
