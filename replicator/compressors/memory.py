# SPDX-License-Identifier: Apache-2.0
"""What compressors keep from step to step: variables, in checkpoints.

Residuals are each replica's own, and are saved as such: on as many replicas they are
restored to the bit, on any other number the first one owes what all of them did. What
is equal on all replicas is saved once.

Of a wrapped optimizer they are found by what its gradients look like, as the sums of
optimizers/accumulators.py; so nothing depends on which of them travel together.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.variables.collected import Owed
from replicator.variables.numbered import Numbered

_ON_READ = tf.VariableSynchronization.ON_READ
_FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


class Memory(Numbered):
    """All that compressors keep for one optimizer, for its checkpoints."""

    def __init__(self) -> None:
        super().__init__(name="compression")


class Place:
    """Where one call of an optimizer, or of all_reduce, keeps what it remembers.

    Args:
        group: Has the variables, and is in checkpoints.
        owner: Who keeps them, for names.
        creating: Returns a block in which variables are created, each once for all
            replicas; None: in the step, where those of all replicas are one.
    """

    def __init__(
        self,
        group: tf.Module,
        owner: str,
        creating: Callable[[], Any] | None = None,
    ) -> None:
        self.owner = owner
        self._group = group
        self._in_step = creating is None
        self._creating = creating or contextlib.nullcontext

    def residual(self, name: str, like: tf.Tensor) -> Residual:
        """Returns what a replica still owes of a tensor: nothing, at first.

        Args:
            name: Within the call.
            like: Has its dtype and shape.

        Raises:
            ArgumentError: The shape is not known.
        """
        if not like.shape.is_fully_defined():
            raise errors.ArgumentError(
                errors.compose(
                    f"{self.owner} cannot keep what is owed of a tensor of shape "
                    f"{like.shape}, which is another in each step.",
                    [f"at {errors.user_line()}"],
                    "say what its shape is (x.set_shape, tf.ensure_shape); or compress "
                    "without error feedback.",
                )
            )
        shape = like.shape.as_list()

        def make() -> tf.Variable:
            variable = self._variable(
                name,
                lambda: tf.zeros([1, *shape], like.dtype),
                [None, *shape],
                like.dtype,
                synchronization=_ON_READ,
                aggregation=tf.VariableAggregation.NONE,
            )
            with context.building(None):
                variable.storage.placement = Owed(variable.world.num_replicas)
            return variable

        return Residual(self._recall(name, make), like.shape)

    def factor(self, name: str, initial: Callable[[], tf.Tensor]) -> tf.Variable:
        """Returns a variable that each replica writes alike, and has a copy of.

        Args:
            name: Within the call.
            initial: Returns what it begins with.
        """
        return self._recall(
            name,
            lambda: self._variable(
                name, initial, synchronization=_ON_READ, aggregation=_FIRST
            ),
        )

    def counter(self, name: str) -> tf.Variable:
        """Returns a variable that counts, alike on all replicas."""
        zero = functools.partial(tf.zeros, [], tf.int64)
        if self._in_step:  # where a function may write what it creates on one replica
            return self.factor(name, zero)
        return self._recall(name, lambda: self._variable(name, zero))

    def generator(self, name: str, seed: int) -> tf.random.Generator:
        """Returns a generator of random numbers, others on each replica."""
        return self._recall(
            name, lambda: tf.random.Generator.from_seed(seed, alg="philox")
        )

    def _recall(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what is kept by a name; creates it, or restores it, if need be."""
        if not hasattr(self._group, name):
            with self._creating(), tf.init_scope():
                made = make()
                with context.building(None):
                    setattr(self._group, name, made)
        return getattr(self._group, name)

    def _variable(
        self,
        name: str,
        initial: Callable[[], tf.Tensor],
        shape: Sequence[int | None] | None = None,
        dtype: tf.DType | None = None,
        **own: Any,
    ) -> tf.Variable:
        with tf.name_scope(self.owner), tf.name_scope("compression"):
            return tf.compat.v1.Variable(
                initial,
                shape=None if shape is None else tf.TensorShape(shape),
                dtype=dtype,
                trainable=False,
                name=f"{self._group.name}/{name}",
                use_resource=True,
                **own,
            )


class Residual:
    """What a replica still owes of one tensor: the row of a variable of all replicas'.

    Args:
        variable: Has the rows.
        shape: The tensor's.
    """

    def __init__(self, variable: tf.Variable, shape: tf.TensorShape) -> None:
        self._variable = variable
        self._shape = shape

    def read(self) -> tf.Tensor:
        """Returns what this replica owes."""
        return tf.ensure_shape(tf.squeeze(self._variable.read_value(), 0), self._shape)

    def write(self, owed: tf.Tensor) -> None:
        """Notes what this replica owes from now on."""
        self._variable.assign(owed[tf.newaxis], read_value=False)
