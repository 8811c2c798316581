# SPDX-License-Identifier: Apache-2.0
"""By what a compressor communicates, and where it remembers, in one call of a replica.

All that is sent goes through the primitives, with the policies of the variables that it
is for: what only the owner of a variable needs is sent to the owner.
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
    """By what a compressor communicates and remembers, on the replica being built.

    Attributes:
        members: The replicas that take part, in order.
        policies: Of which variable each tensor is, and which replica needs it.
        names: One for each tensor, which tells it from the others of the call.
        place: Where variables are kept.
        algorithm: How sums are made, one of ALGORITHM_NAMES; None: the cheapest.
        keeps_rest: Whether what is not sent is kept. Then all that is received has to
            be the sum of what the replicas say they sent, rounding included.
        scale: What the tensors are multiplied by for a while, a loss scale; or None.
        is_spoilt: Whether any replica was given what is not finite: no update will be
            made of this step, or none that is of use.
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
        """How many replicas take part."""
        return len(self.members)

    def of(self, places: Sequence[int]) -> Link:
        """Returns the link for some of the tensors."""
        return dataclasses.replace(
            self,
            policies=tuple(self.policies[k] for k in places),
            names=tuple(self.names[k] for k in places),
        )

    def feeding_back(self) -> Link:
        """Returns the link for a compressor whose rest is kept."""
        return dataclasses.replace(self, keeps_rest=True)

    # --- Communication ----------------------------------------------------------------

    def sum(
        self, tensors: Sequence[tf.Tensor], of: Sequence[int | None] | None = None
    ) -> list[tf.Tensor]:
        """Returns the sums of tensors over the replicas.

        16-bit floats are added up in float32, and rounded once more.

        Args:
            tensors: Any of them may be smaller than what it stands for.
            of: Which tensor each is sent for; None for what all replicas need. One
                after the other, unless given.
        """
        return all_reduce.reduce_dense(
            list(tensors),
            "sum",
            group=self.members,
            policies=[self._policy(k) for k in self._places(tensors, of)],
            algorithm=self.algorithm,
        )

    def gather(self, payloads: Sequence[Any]) -> list[Any]:
        """Returns what the replicas send of each tensor, stacked in replica order.

        Args:
            payloads: A nest of tensors for each tensor of the call.
        """
        leaves = [tf.nest.flatten(payload) for payload in payloads]
        policies = [self._policy(k) for k, own in enumerate(leaves) for _ in own]
        flat = base.flatten([leaf for own in leaves for leaf in own], "a compressor")
        gathered = iter(
            all_gather.gather_dense(flat, None, group=self.members, policies=policies)
        )
        return [
            tf.nest.pack_sequence_as(payload, [next(gathered) for _ in own])
            for payload, own in zip(payloads, leaves, strict=True)
        ]

    def exchange(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends the n-th row of each tensor to the n-th replica.

        Args:
            tensors: As many rows as there are replicas.

        Returns:
            The rows that the replicas sent to this one, in replica order.
        """
        return all_to_all.exchange(list(tensors), 0, 0, None, group=self.members)

    def collect(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what all replicas pass, stacked in replica order, for all of them.

        Each replica sends its tensors to the others, once. Copies of replicas cannot
        be told apart as the roots of that: theirs are gathered.

        Args:
            tensors: Alike on all replicas.
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

    # --- Memory -----------------------------------------------------------------------

    def residual(self, k: int, like: tf.Tensor) -> Residual:
        """Returns what this replica owes of the k-th tensor.

        Args:
            k: Which tensor.
            like: Has its dtype and shape.
        """
        return self.place.residual(f"residual_{self.names[k]}", like)

    def factor(self, k: int, initial: Callable[[], tf.Tensor]) -> tf.Variable:
        """Returns a variable for the k-th tensor, of which each replica has a copy.

        Args:
            k: Which tensor.
            initial: Returns what it begins with, the same in each run.
        """
        return self.place.factor(f"factor_{self.names[k]}", initial)

    def count(self) -> tf.Tensor:
        """Returns how often this was called in the steps before."""
        counter = self.place.counter(f"calls_{self.names[0]}")
        before = counter.read_value()
        self.write(counter, before + 1)
        return before

    def write(self, variable: tf.Variable, value: tf.Tensor) -> None:
        """Assigns what is equal on all replicas."""
        replica = context.require("a compressor")
        with replica.equal_updates(self.place.owner):
            variable.assign(value, read_value=False)

    def uniform(self, shape: Any, dtype: tf.DType) -> tf.Tensor:
        """Returns random numbers between 0 and 1, others on each replica.

        A run that is restored from a checkpoint goes on with the same.

        Args:
            shape: Their shape.
            dtype: Their dtype.
        """
        name = f"noise_{self.names[0]}"
        seed = zlib.crc32(f"{self.place.owner} {name}".encode())
        return self.place.generator(name, seed).uniform(shape, dtype=dtype)

    def scaled(self, owed: tf.Tensor) -> tf.Tensor:
        """Returns what is kept, multiplied as the tensors are for now."""
        return owed if self.scale is None else owed * tf.cast(self.scale, owed.dtype)

    def unscaled(self, owed: tf.Tensor) -> tf.Tensor:
        """Returns what is to be kept, whatever tensors are multiplied by later."""
        return owed if self.scale is None else owed / tf.cast(self.scale, owed.dtype)
