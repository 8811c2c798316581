# SPDX-License-Identifier: Apache-2.0
"""Digests of what values are computed from, comparable between processes.

Within a process, the values of two replicas are compared op by op. Processes that build
graphs of their own can only compare digests of what is proven equal within each: the
same program gives the same digest, and a different constant gives another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator._tf import effects, functions
from replicator.graph.equal.value_numbering import description, is_pure
from replicator.graph.ir import placeholder
from replicator.graph.ir.captures import Captures
from replicator.graph.ir.kinds import kind_of


class Digests:
    """Computes and caches digests of tensors.

    Args:
        key_of: Returns the key of the variable behind a handle, or None.
    """

    def __init__(self, key_of: Callable[[tf.Tensor], str | None]) -> None:
        self._key_of = key_of
        self._captures = Captures()
        self._known: dict[int, str] = {}

    def of_inputs(self, op: tf.Operation) -> str:
        """Returns a digest of an op and of all its inputs."""
        return _hashed(_facts(op), *(self.of(tensor) for tensor in op.inputs))

    def of(self, tensor: tf.Tensor) -> str:
        """Returns the digest of a tensor, without recursion: graphs are deep."""
        stack = [tensor]
        while stack:
            top = stack[-1]
            if id(top) in self._known:
                stack.pop()
                continue
            facts, inputs = self._origin(top)
            missing = [t for t in inputs if id(t) not in self._known]
            if missing:
                stack += missing
                continue
            self._known[id(top)] = _hashed(
                *facts, *(self._known[id(t)] for t in inputs)
            )
        return self._known[id(tensor)]

    def _origin(self, tensor: tf.Tensor) -> tuple[list[Any], list[tf.Tensor]]:
        """Returns a tensor's identifying facts, and the inputs it is computed from."""
        outside = self._captures.outermost(tensor)
        key = self._key_of(outside) if tensor.dtype == tf.resource else None
        if key is not None:
            return ["variable", key], []
        if not tf.is_symbolic_tensor(outside):
            return _of_constant(outside), []
        op = tensor.op
        call = placeholder.read(op)
        if call is not None:
            return ["call", call.key, tensor.value_index], []
        if op.type == "Placeholder":
            return ["argument", tensor.dtype.name], []
        if is_pure(op) or effects.only_reads(op) or kind_of(op).calls:
            return [_facts(op), tensor.value_index], list(op.inputs)
        return ["effect", op.type, tensor.value_index], []


def _of_constant(tensor: tf.Tensor) -> list[Any]:
    """Returns the identifying facts of a tensor that is not symbolic."""
    if tensor.dtype in (tf.resource, tf.variant):
        return ["outside", tensor.dtype.name]
    return ["constant", tensor.dtype.name, tensor.shape, tensor.numpy().tobytes()]


def _facts(op: tf.Operation) -> Any:
    """Describes an op, and the functions it calls."""
    if not kind_of(op).calls:
        return description(op)
    bodies = [
        [description(inner) for inner in body.get_operations() if not _calls(inner)]
        for _, body in functions.called_graphs(op)
    ]
    return [op.type, bodies]


def _calls(op: tf.Operation) -> bool:
    return kind_of(op).calls or placeholder.read(op) is not None


def _hashed(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
