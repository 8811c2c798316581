# SPDX-License-Identifier: Apache-2.0
"""Adds up over the replicas what a program for one device computes for its variables.

Such a program has no op that sums gradients: its replicas compute summands of what one
device computes (forms/). Where the total is for a variable, it is communicated as the
variable's gradient is in every step: to the owner of each part, in the buckets and by
the algorithm of its synchronizer, compressed if that or a wrapped optimizer says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.compressors import reducing
from replicator.compressors.base import Compressor
from replicator.compressors.memory import Memory
from replicator.graph.ir import shapes
from replicator.graph.ir.placeholder import NO_POLICY, OperandPolicy
from replicator.graph.passes.rows import Parts
from replicator.optimizers.compression import Compression, Reducer
from replicator.primitives import all_reduce
from replicator.variables.partitioned import PartitionedVariable


class Totals:
    """Adds up tensors for variables, in all builds of one program.

    Args:
        name: The program's name, for names of variables and messages.
        compressions: How optimizers compress the gradients of variables, by the ids of
            the variables (single_device.View.compressions).
    """

    def __init__(self, name: str, compressions: Mapping[int, Compression]) -> None:
        self._default = Compression(None, name)
        self._compressions = compressions

    @property
    def memory(self) -> Memory:
        """What compressors remember that belong to no optimizer, for checkpoints."""
        return self._default.memory

    def add_up(
        self, tensors: Sequence[tf.Tensor], variables: Sequence[Any]
    ) -> list[tf.Tensor]:
        """Returns the sums over the replicas.

        Args:
            tensors: This replica's summands, of any dtypes and shapes.
            variables: For each tensor, the library's variable that its total is for, or
                None.
        """
        wholes = [
            _Whole(tensor, variable, self._compression(variable))
            for tensor, variable in zip(tensors, variables, strict=True)
        ]
        pieces = [piece for whole in wholes for piece in whole.pieces]
        sums = iter(self._sums(pieces))
        return [whole.joined([next(sums) for _ in whole.pieces]) for whole in wholes]

    def _compression(self, variable: Any) -> Compression:
        return self._compressions.get(id(variable), self._default)

    def _sums(self, pieces: Sequence[_Piece]) -> list[tf.Tensor]:
        results: list[Any] = [None] * len(pieces)
        groups: dict[Any, list[int]] = {}
        for k, piece in enumerate(pieces):
            is_compressed = piece.compressor is not None
            groups.setdefault(piece.compression if is_compressed else None, []).append(
                k
            )
        for compression, indices in groups.items():
            group = [pieces[k] for k in indices]
            if compression is None:
                tensors, policies = _columns(group)
                sums = all_reduce.combine(tensors, "sum", None, policies=policies)
            else:
                sums = _reducer(compression, group)(_columns(group)[0], "sum")
            for k, total in zip(indices, sums, strict=True):
                results[k] = total
        return results


class _Piece:
    """A summand for one variable or one part of a variable."""

    def __init__(
        self, tensor: tf.Tensor, variable: Any, compression: Compression
    ) -> None:
        self.tensor, self.variable, self.compression = tensor, variable, compression
        self.policy: OperandPolicy = NO_POLICY
        self.compressor: Compressor | None = None
        if variable is not None:
            self.policy = variable.policy
            compressor = compression.compressor_of(variable)
            if reducing.can_compress(compressor, tensor):
                self.compressor = compressor


class _Whole:
    """A summand, and its pieces for the parts of its variable."""

    def __init__(
        self, tensor: tf.Tensor, variable: Any, compression: Compression
    ) -> None:
        parts, cut = [variable], [tensor]
        self._layout: Parts | None = None
        if isinstance(variable, PartitionedVariable) and _is_like(tensor, variable):
            parts, self._layout = list(variable.parts), variable.layout
            cut = variable.layout.split(tensor)
        self.pieces = [
            _Piece(piece, part, compression)
            for piece, part in zip(cut, parts, strict=True)
        ]

    def joined(self, totals: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the total of the whole."""
        return totals[0] if self._layout is None else self._layout.join(totals)


def _is_like(tensor: tf.Tensor, variable: Any) -> bool:
    return tensor.shape.rank == variable.shape.rank and bool(
        tensor.shape.is_compatible_with(variable.shape)
    )


def _columns(
    pieces: Sequence[_Piece],
) -> tuple[list[tf.Tensor], list[OperandPolicy]]:
    return [piece.tensor for piece in pieces], [piece.policy for piece in pieces]


def _reducer(compression: Compression, pieces: Sequence[_Piece]) -> Reducer:
    """Returns the reducer of compressed tensors; all builds share its memory."""
    tensors, policies = _columns(pieces)
    keys = tuple(piece.variable.key for piece in pieces)
    return Reducer(
        compression,
        ("a program for one device", keys),
        tuple(map(shapes.static, tensors)),
        policies,
        [piece.compressor for piece in pieces],
        context.require("a compressor").creating_for_all,
        lambda: None,
    )
