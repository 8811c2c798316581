# SPDX-License-Identifier: Apache-2.0
"""Traces a function that was written for one device, for arguments of one kind.

What is traced is the function as it is on one device. The engine of whole-batch
programs (forms/) runs it on the replicas. A batch is split over the replicas, unless
some would get no example at all: then each replica computes the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.forms.engine import WholeBatchFunction
from replicator.forms.traced import Made, Specs
from replicator.graph.ir import shapes


@dataclasses.dataclass(frozen=True)
class Signature:
    """What calls that share a trace have in common.

    Attributes:
        structure: The arguments of one such call, with None in place of tensors.
        indices: The indices of the leaves that are tensors.
        specs: Of these tensors.
    """

    structure: Any
    indices: Sequence[int]
    specs: Specs

    @property
    def flat_specs(self) -> list[tf.TensorSpec]:
        """Specs of the tensors that the tensors consist of."""
        return list(tf.nest.flatten(self.specs, expand_composites=True))

    @property
    def have_rows(self) -> list[bool]:
        """Which of these are split into rows."""
        return [
            is_batch(spec)
            for spec in self.specs
            for _ in tf.nest.flatten(spec, expand_composites=True)
        ]

    def packed(self, flat: Sequence[tf.Tensor]) -> Any:
        """Returns arguments of these flat tensors, in the structure."""
        tensors = tf.nest.pack_sequence_as(
            list(self.specs), list(flat), expand_composites=True
        )
        leaves = tf.nest.flatten(self.structure)
        for k, tensor in zip(self.indices, tensors, strict=True):
            leaves[k] = tensor
        return tf.nest.pack_sequence_as(self.structure, leaves)


class Trace:
    """A function, traced for arguments of one kind.

    Args:
        function: The function, for one device.
        repl: The Replicator that runs it.
        signature: The kind of its arguments.
        made: The variables that the function has made so far.
        local_statistics: Whether batch normalization uses those of each replica's rows.

    Attributes:
        whole: Takes flat tensors.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        repl: Any,
        signature: Signature,
        made: Made,
        local_statistics: bool,
    ) -> None:
        self._num_replicas, self._have_rows = repl.num_replicas, signature.have_rows
        several = repl.num_replicas > 1  # one computes all rows as they are
        parts = [0 if has_rows and several else None for has_rows in self._have_rows]
        self._patterns = {True: tuple(parts), False: (None,) * len(parts)}

        @_tf.not_converted
        def flat(*tensors: tf.Tensor) -> Any:
            return function(*signature.packed(tensors))

        self.whole = WholeBatchFunction(
            *(flat, repl, signature.flat_specs),
            made=made,
            local_statistics=local_statistics,
        )

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Runs the function, whatever is known of the number of rows.

        Args:
            tensors: The flat arguments; those with rows have equally many.
        """
        pairs = zip(tensors, self._have_rows, strict=True)
        batch = next((tensor for tensor, has_rows in pairs if has_rows), None)
        rows = 0 if batch is None else shapes.size(batch, 0)
        if rows is None and self._num_replicas > 1:
            return tf.cond(
                self.is_split(tf.shape(batch)[0]),
                lambda: self.function(True)(*tensors),
                lambda: self.function(False)(*tensors),
            )
        is_split = self.is_split(rows or 0)
        if tf.executing_eagerly() and not _tf.may_record():
            return self.run(is_split, tensors)
        return self.function(is_split)(*tensors)

    def is_split(self, rows: Any) -> Any:
        """Whether the replicas divide a batch of so many rows; else each has all."""
        return rows >= self._num_replicas

    def run(self, is_split: bool, tensors: Sequence[tf.Tensor]) -> Any:
        """Runs the function eagerly, where no tape records.

        Args:
            is_split: Whether the replicas divide the rows.
            tensors: The flat arguments.
        """
        return self.whole.run(self._patterns[is_split], tensors)

    def function(self, is_split: bool) -> Any:
        """Returns a function of the flat arguments, for tapes and other functions."""
        return self.whole.function(self._patterns[is_split])


def is_batch(tensor: Any) -> bool:
    """Whether a tensor, or what has such a spec, is split into rows."""
    is_dense = isinstance(tensor, tf.Tensor) or type(tensor) is tf.TensorSpec
    return is_dense and tensor.shape.rank != 0
