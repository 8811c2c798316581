# SPDX-License-Identifier: Apache-2.0
"""Joins a replica's adjacent calls into one call of all their tensors.

A program for one device takes the gradients of its variables one by one, and a call of
its own sums each. Adjacent calls that do not need one another's results become one
call: small tensors then share a message, and cloned replicas copy one placeholder in
place of hundreds.

Runs once per build on each replica that step_fn was called for, before any is copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import TOGETHER, Call, Placeholder, Value


def join(ops: Sequence[tf.Operation], scope: str) -> list[tf.Operation]:
    """Joins those calls of one replica that may share messages.

    Args:
        ops: The replica's ops in build order, which is topological.
        scope: The replica's name scope, with the final "/".

    Returns:
        The ops in a topological order, with joined calls in place of single ones.
    """
    joiner = _Joiner(scope)
    for op in ops:
        joiner.add(op)
    joiner.flush()
    return joiner.ops


class _Joiner:
    """Goes through ops in order, and delays those that need the pending calls.

    Args:
        scope: The name scope of the replica.

    Attributes:
        ops: The ops so far, in their new order.
    """

    def __init__(self, scope: str) -> None:
        self.ops: list[tf.Operation] = []
        self._scope = scope
        self._pending: list[Placeholder] = []  # calls that will become one
        self._delayed: list[tf.Operation] = []  # ops that need its results
        self._waiting: set[tf.Operation] = set()  # all of these, for look-ups

    def add(self, op: tf.Operation) -> None:
        """Adds the next op."""
        call = _joinable_call(op)
        if self._pending and self._must_flush(op, call):
            self.flush()
        if call is not None:
            self._pending.append(Placeholder(op, call))
            self._waiting.add(op)
        elif self._pending and self._needs_pending(op):
            self._delayed.append(op)
            self._waiting.add(op)
        else:
            self.ops.append(op)

    def _must_flush(self, op: tf.Operation, call: Call | None) -> bool:
        """Whether the pending calls must come before an op."""
        if call is not None:
            first = self._pending[0].call
            is_alike = (call.options, call.group) == (first.options, first.group)
            return not is_alike or self._needs_pending(op)
        # Effects and communication keep the order in which they were built.
        kind = kind_of(op)
        if placeholder.read(op) is not None or kind.calls:
            return True
        return kind.stateful and self._needs_pending(op)

    def _needs_pending(self, op: tf.Operation) -> bool:
        """Whether an op depends on the results of the pending calls."""
        sources = [tensor.op for tensor in op.inputs]
        return not self._waiting.isdisjoint([*sources, *op.control_inputs])

    def flush(self) -> None:
        """Joins the pending calls, and adds the delayed ops behind them."""
        parts = self._pending
        if parts:
            is_single = len(parts) == 1
            self.ops.append(
                parts[0].op if is_single else _join_calls(parts, self._scope)
            )
        self.ops += self._delayed
        self._pending, self._delayed, self._waiting = [], [], set()


def _joinable_call(op: tf.Operation) -> Call | None:
    """Returns the call of an op if it may be joined with others, else None."""
    call = placeholder.read(op)
    if call is None or not call.options.get(TOGETHER) or op.control_inputs:
        return None
    return call


def _join_calls(parts: Sequence[Placeholder], scope: str) -> tf.Operation:
    """Replaces several calls by one; returns its op."""
    call = dataclasses.replace(
        parts[0].call,
        operands=tuple(value for part in parts for value in part.call.operands),
        agreed=tuple(value for part in parts for value in part.call.agreed),
        policies=tuple(
            part.call.policy(k) for part in parts for k in range(len(part.operands))
        ),
    )
    operands = [tensor for part in parts for tensor in part.operands]
    results = [tensor for part in parts for tensor in part.results]
    with tf.name_scope(scope), tf.control_dependencies(None):
        op = placeholder.put(call, operands, [Value.of(result) for result in results])
    for old, new in zip(results, op.outputs, strict=True):
        _tf.replace(old, new)
    for part in parts:
        _tf.move_control_outputs(part.op, op)
    _tf.abandon([part.op for part in parts])
    return op
