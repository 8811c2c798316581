# SPDX-License-Identifier: Apache-2.0
"""State that compressors keep from step to step: variables, saved in checkpoints.

Residuals differ between replicas and are saved per replica. With the same number of
replicas they are restored bit for bit; with another, the first replica gets the sum of
all. A variable that is equal on all replicas is saved once.

The variables of a wrapped optimizer are found by the signature of its gradients, as the
sums of optimizers/accumulators.py are; so nothing depends on how gradients are put into
buckets.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.variables.chooser import Description
from replicator.variables.collected import Owed
from replicator.variables.numbered import Numbered

_ON_READ = tf.VariableSynchronization.ON_READ
_FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


class Memory(Numbered):
    """All state that compressors keep for one optimizer, for its checkpoints."""

    def __init__(self) -> None:
        super().__init__(name="compression")


class StateStore:
    """Holds the compressors' state for one call of an optimizer, or of all_reduce.

    Args:
        group: Holds the variables, and is in checkpoints.
        owner: The name of the optimizer or function that uses them.
        creating: Returns a context in which variables are created, each once for all
            replicas. None: in the step, where the replicas' variables are one.

    Attributes:
        group: The module that holds the variables.
    """

    def __init__(
        self,
        group: tf.Module,
        owner: str,
        creating: Callable[[], Any] | None = None,
    ) -> None:
        self.owner = owner
        self.group = group
        self._in_step = creating is None
        self._creating = creating or contextlib.nullcontext

    def residual(self, name: str, like: tf.Tensor) -> Residual:
        """Returns this replica's residual of a tensor, zeros at first.

        Args:
            name: Its name within the call.
            like: A tensor of its dtype and shape.

        Raises:
            ArgumentError: The shape is not static, or not that of the stored residual.
        """
        if not like.shape.is_fully_defined():
            raise errors.ArgumentError(
                f"{self.owner} cannot keep the residual of a tensor of shape "
                f"{like.shape}, which may change from step to step.",
                fix="set its static shape (x.set_shape, tf.ensure_shape); or compress "
                "without error feedback.",
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
                owed = Owed(variable.world.num_replicas)
                variable.storage.description = Description(owed)
            return variable

        residual = self._recall(name, make)
        stored_shape = residual.shape[1:]
        if (residual.dtype, stored_shape) != (like.dtype, like.shape):
            raise errors.ArgumentError(
                f"{self.owner} keeps the residual of a tensor "
                f"{residual.dtype.name}{stored_shape}, but now compresses one "
                f"{like.dtype.name}{like.shape} in its place.",
                fix="give each step_fn a Kept of its own; in a compressor of your own, "
                "use one index for each tensor.",
            )
        return Residual(residual, like.shape)

    def factor(self, name: str, initial: Callable[[], tf.Tensor]) -> tf.Variable:
        """Returns a variable that all replicas write equally, each on its own copy.

        Args:
            name: Its name within the call.
            initial: Returns the initial value.
        """
        return self._recall(
            name,
            lambda: self._variable(
                name, initial, synchronization=_ON_READ, aggregation=_FIRST
            ),
        )

    def counter(self, name: str) -> tf.Variable:
        """Returns a variable that counts, equal on all replicas."""
        zero = functools.partial(tf.zeros, [], tf.int64)
        if self._in_step:  # there, a function may write its variables on one replica
            return self.factor(name, zero)
        return self._recall(name, lambda: self._variable(name, zero))

    def generator(self, name: str, seed: int) -> tf.random.Generator:
        """Returns a random number generator that differs between replicas."""
        return self._recall(
            name, lambda: tf.random.Generator.from_seed(seed, alg="philox")
        )

    def _recall(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns the object stored under a name; creates or restores it if needed."""
        if not hasattr(self.group, name):
            with self._creating(), tf.init_scope():
                created = make()
                with context.building(None):
                    setattr(self.group, name, created)
        return getattr(self.group, name)

    def _variable(
        self,
        name: str,
        initial: Callable[[], tf.Tensor],
        shape: Sequence[int | None] | None = None,
        dtype: tf.DType | None = None,
        **options: Any,
    ) -> tf.Variable:
        with tf.name_scope(self.owner), tf.name_scope("compression"):
            return tf.compat.v1.Variable(
                initial,
                shape=None if shape is None else tf.TensorShape(shape),
                dtype=dtype,
                trainable=False,
                name=f"{self.group.name}/{name}",
                use_resource=True,
                **options,
            )


class Residual:
    """A replica's residual of one tensor: its row of a variable with a row per replica.

    `compressors.Link.residual` returns it, zeros at first. Checkpoints hold it if the
    compressor is one of a wrapped optimizer or of a `compressors.Kept`.

    Example:
        >>> from replicator import compressors
        >>> class Whole(compressors.Compressor):  # the fractions are sent later
        ...     def reduce(self, tensors, link):
        ...         (tensor,) = tensors
        ...         residual = link.residual(0, tensor)
        ...         target = tensor + residual.read()
        ...         sent = tf.floor(target)
        ...         residual.write(target - sent)
        ...         return compressors.Sums(link.sum([sent]), [sent])
        >>> def step_fn():
        ...     return repl.all_reduce(tf.constant([0.75]), compressor=Whole())
        >>> [float(repl.run(step_fn)[0][0]) for _ in range(4)]
        [0.0, 2.0, 2.0, 2.0]

    Args:
        variable: The variable.
        shape: The tensor's shape.
    """

    def __init__(self, variable: tf.Variable, shape: tf.TensorShape) -> None:
        self._variable = variable
        self._shape = shape

    def read(self) -> tf.Tensor:
        """Returns this replica's residual, of the tensor's shape and dtype.

        Example:
            >>> from replicator import compressors
            >>> class Late(compressors.Compressor):  # sends in the next step
            ...     def reduce(self, tensors, link):
            ...         residual = link.residual(0, tensors[0])
            ...         sent = residual.read()
            ...         residual.write(tensors[0])
            ...         return compressors.Sums(link.sum([sent]), [sent])
            >>> def step_fn():
            ...     return repl.all_reduce(tf.constant(1.0), compressor=Late())
            >>> [float(repl.run(step_fn)[0]) for _ in range(3)]
            [0.0, 2.0, 2.0]
        """
        return tf.ensure_shape(tf.squeeze(self._variable.read_value(), 0), self._shape)

    def write(self, owed: tf.Tensor) -> None:
        """Assigns this replica's residual.

        Example:
            >>> from replicator import compressors
            >>> class Slow(compressors.Compressor):  # sends half of what is owed
            ...     def reduce(self, tensors, link):
            ...         residual = link.residual(0, tensors[0])
            ...         half = (tensors[0] + residual.read()) / 2
            ...         residual.write(half)
            ...         return compressors.Sums(link.sum([half]), [half])
            >>> def step_fn():
            ...     return repl.all_reduce(tf.constant(1.0), compressor=Slow())
            >>> [float(repl.run(step_fn)[0]) for _ in range(3)]
            [1.0, 1.5, 1.75]

        Args:
            owed: A tensor of the shape and dtype that `read` returns.
        """
        self._variable.assign(owed[tf.newaxis], read_value=False)
