# SPDX-License-Identifier: Apache-2.0
"""State: what a compressor keeps from step to step, in one call of a replica.

The base of Link. memory.py has the variables that hold it, and how checkpoints save
them.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.compressors.memory import Residual, StateStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """Holds state for a compressor, on the replica being built.

    Attributes:
        names: One name per tensor, unique within the call.
        place: Holds the variables.
        scale: The loss scale by which the tensors are multiplied, a scalar; or None.
    """

    names: tuple[str, ...]
    place: StateStore
    scale: tf.Tensor | None = None

    def residual(self, k: int, like: tf.Tensor) -> Residual:
        """Returns this replica's residual of the k-th tensor.

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
            ...     return repl.all_reduce(tf.constant(0.5), compressor=Whole())
            >>> [float(repl.run(step_fn)[0]) for _ in range(3)]
            [0.0, 2.0, 0.0]

        Args:
            k: The index of the tensor.
            like: A tensor of its dtype and shape.

        Raises:
            ArgumentError: The shape is not static.
        """
        return self.place.residual(f"residual_{self.names[k]}", like)

    def factor(self, k: int, initial: Callable[[], tf.Tensor]) -> tf.Variable:
        """Returns a variable for the k-th tensor, of which each replica has a copy.

        Example:
            >>> from replicator import compressors
            >>> class Quantized(compressors.Compressor):
            ...     def reduce(self, tensors, link):
            ...         (tensor,) = tensors
            ...         unit = link.factor(0, lambda: tf.constant(1.0))
            ...         now = unit.read_value()
            ...         sent = [now * tf.round(tensor / now)]
            ...         link.write(unit, now / 2)  # finer in the next step
            ...         return compressors.Sums(link.sum(sent), sent)
            >>> def step_fn():
            ...     return repl.all_reduce(tf.constant(0.7), compressor=Quantized())
            >>> [float(repl.run(step_fn)[0]) for _ in range(3)]
            [2.0, 1.0, 1.5]

        Args:
            k: The index of the tensor.
            initial: Returns the initial value, of any shape and dtype; the same in
                every run.
        """
        return self.place.factor(f"factor_{self.names[k]}", initial)

    def count(self) -> tf.Tensor:
        """Returns how many times this was called in earlier steps, a scalar int64.

        Call it once per `reduce`.

        Example:
            >>> from replicator import compressors
            >>> class EveryOther(compressors.Compressor):
            ...     def reduce(self, tensors, link):
            ...         factor = tf.cast(link.count() % 2, tf.float32)
            ...         sent = [factor * x for x in tensors]
            ...         return compressors.Sums(link.sum(sent), sent)
            >>> def step_fn():
            ...     return repl.all_reduce(tf.constant(1.0), compressor=EveryOther())
            >>> [float(repl.run(step_fn)[0]) for _ in range(4)]
            [0.0, 2.0, 0.0, 2.0]
        """
        counter = self.place.counter(f"calls_{self.names[0]}")
        before = counter.read_value()
        self.write(counter, before + 1)
        return before

    def write(self, variable: tf.Variable, value: tf.Tensor) -> None:
        """Assigns a value that is equal on all replicas.

        Example:
            >>> from replicator import compressors
            >>> class Peak(compressors.Compressor):  # clips at the sums seen before
            ...     def reduce(self, tensors, link):
            ...         (tensor,) = tensors
            ...         peak = link.factor(0, lambda: tf.constant(1.0))
            ...         sent = [tf.minimum(tensor, peak.read_value())]
            ...         (total,) = link.sum(sent)
            ...         link.write(peak, tf.reduce_max(total))
            ...         return compressors.Sums([total], sent)
            >>> def step_fn():
            ...     return repl.all_reduce(tf.constant([9.0]), compressor=Peak())
            >>> [float(repl.run(step_fn)[0][0]) for _ in range(3)]
            [2.0, 4.0, 8.0]

        Args:
            variable: One that `factor` returned.
            value: A tensor of its shape and dtype, computed from what all replicas
                received.
        """
        replica = context.require("a compressor")
        with replica.equal_updates(self.place.owner):
            variable.assign(value, read_value=False)

    def uniform(self, shape: Any, dtype: tf.DType) -> tf.Tensor:
        """Returns random numbers between 0 and 1, different on each replica.

        A run restored from a checkpoint continues the same sequence.

        Example:
            >>> from replicator import compressors
            >>> class Whole(compressors.Compressor):  # rounds up or down by chance
            ...     def reduce(self, tensors, link):
            ...         (x,) = tensors
            ...         sent = [tf.floor(x + link.uniform(x.shape, x.dtype))]
            ...         return compressors.Sums(link.sum(sent), sent)
            >>> def step_fn():
            ...     return repl.all_reduce(tf.fill([1000], 0.3), compressor=Whole())
            >>> total = repl.run(step_fn)[0].numpy()
            >>> sorted(set(total.tolist())), bool(0.5 < total.mean() < 0.7)
            ([0.0, 1.0, 2.0], True)

        Args:
            shape: Their shape.
            dtype: Their dtype, a floating one.

        Returns:
            A tensor of that shape and dtype; 0 <= x < 1.
        """
        name = f"noise_{self.names[0]}"
        seed = zlib.crc32(f"{self.place.owner} {name}".encode())
        return self.place.generator(name, seed).uniform(shape, dtype=dtype)

    def scaled(self, owed: tf.Tensor) -> tf.Tensor:
        """Multiplies a residual by the loss scale of the tensors.

        Without a loss scale it returns the residual. What a compressor keeps should be
        in units of the gradients themselves, since the scale may change between steps.

        Example:
            >>> from replicator import compressors
            >>> class Whole(compressors.Compressor):  # the fractions are sent later
            ...     def reduce(self, tensors, link):
            ...         (tensor,) = tensors
            ...         residual = link.residual(0, tensor)
            ...         target = tensor + link.scaled(residual.read())
            ...         sent = tf.floor(target)
            ...         residual.write(link.unscaled(target - sent))
            ...         return compressors.Sums(link.sum([sent]), [sent])
            >>> def step_fn():
            ...     return repl.all_reduce(tf.constant(0.5), compressor=Whole())
            >>> [float(repl.run(step_fn)[0]) for _ in range(3)]
            [0.0, 2.0, 0.0]

        Args:
            owed: A tensor of any shape.
        """
        return owed if self.scale is None else owed * tf.cast(self.scale, owed.dtype)

    def unscaled(self, owed: tf.Tensor) -> tf.Tensor:
        """Divides a residual by the loss scale, which may be another in later steps.

        The inverse of `scaled`, before `Residual.write`.

        Example:
            >>> from replicator import compressors
            >>> class Kept(compressors.Compressor):  # sends in every other step
            ...     def reduce(self, tensors, link):
            ...         (tensor,) = tensors
            ...         residual = link.residual(0, tensor)
            ...         target = tensor + link.scaled(residual.read())
            ...         sent = tf.cast(link.count() % 2, tensor.dtype) * target
            ...         residual.write(link.unscaled(target - sent))
            ...         return compressors.Sums(link.sum([sent]), [sent])
            >>> def step_fn():
            ...     return repl.all_reduce(tf.constant(1.0), compressor=Kept())
            >>> [float(repl.run(step_fn)[0]) for _ in range(4)]
            [0.0, 4.0, 0.0, 4.0]

        Args:
            owed: A tensor of any shape, in units of the tensors.
        """
        return owed if self.scale is None else owed / tf.cast(self.scale, owed.dtype)
