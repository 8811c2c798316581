# SPDX-License-Identifier: Apache-2.0
"""Joins calls of a replica that do not need one another's results into one.

A program for one device takes the gradients of its variables one by one, and assigns
the statistics of each batch normalization separately; each needs a call. Those that
follow one another, with nothing in between that needs their results at once, become one
call: small tensors then share a message, and cloned replicas copy one placeholder in
place of hundreds.

Runs once per build on the replicas that step_fn was called for, before any is copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import ops as tf_ops
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import Kind, kind_of, resource_inputs
from replicator.graph.ir.placeholder import (
    Call,
    Placeholder,
    Value,
)

# Writes that may come later, as long as nothing else touches their variables.
_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_Calls = list[Placeholder]  # that become one


def join(
    replicas: Sequence[Sequence[tf.Operation]],
    scopes: Sequence[str],
    variable_of: Callable[[tf.Tensor], Any],
) -> list[list[tf.Operation]]:
    """Joins those calls of each replica that may share messages on all of them.

    Args:
        replicas: The ops of each replica in build order, which is topological.
        scopes: The name scope of each replica, with the final "/".
        variable_of: Returns the variable of a handle; None if it is unknown.

    Returns:
        The ops of each replica in a topological order, with joined calls in place of
        single ones.
    """
    plans = [_planned(ops, variable_of) for ops in replicas]
    starts = [_starts(plan) for plan in plans]
    if any(start != starts[0] for start in starts):
        # An op between two calls on one replica only separates them on all replicas.
        plans = [_planned(ops, variable_of, set().union(*starts)) for ops in replicas]
    if _differ(plans):  # the error that follows then names single calls
        return [list(ops) for ops in replicas]
    return [
        [_join_calls(step, scope) if isinstance(step, list) else step for step in plan]
        for plan, scope in zip(plans, scopes, strict=True)
    ]


def _planned(
    ops: Sequence[tf.Operation],
    variable_of: Callable[[tf.Tensor], Any],
    starts: Container[str] = (),
) -> list[tf.Operation | _Calls]:
    """Returns the ops of a replica in their new order, with the calls to join."""
    joiner = _Joiner(variable_of, starts)
    for op in ops:
        joiner.add(op)
    joiner.flush()
    return joiner.steps


def _starts(plan: Sequence[tf.Operation | _Calls]) -> set[str]:
    """Returns the key of the first call of each group that becomes one."""
    return {step[0].call.key for step in plan if isinstance(step, list)}


def _calls(parts: _Calls) -> list[Call]:
    return [part.call for part in parts]


def _differ(plans: Sequence[Sequence[tf.Operation | _Calls]]) -> bool:
    """Whether the calls that would be joined do not pair across replicas."""
    described = [
        [
            [(c.key, c.options, c.assignment, c.agreed) for c in _calls(step)]
            for step in plan
            if isinstance(step, list)
        ]
        for plan in plans
    ]
    return any(calls != described[0] for calls in described)


class _Joiner:
    """Visits ops in order, and delays those that need the pending calls.

    Args:
        variable_of: Returns the variable of a handle; None if it is unknown.
        starts: The keys of calls before which the pending ones are joined.

    Attributes:
        steps: The ops so far in their new order, with a list for calls to join.
    """

    def __init__(
        self, variable_of: Callable[[tf.Tensor], Any], starts: Container[str]
    ) -> None:
        self.steps: list[tf.Operation | _Calls] = []
        self._variable_of = variable_of
        self._starts = starts
        self._pending: _Calls = []  # calls that will become one
        self._delayed: list[tf.Operation] = []  # ops that need its results
        self._waiting: set[tf.Operation] = set()  # all of these, for look-ups
        self._written: set[int | None] = set()  # what delayed ops write

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
            self._written.update(self._touched(op))
        else:
            self.steps.append(op)

    def _must_flush(self, op: tf.Operation, call: Call | None) -> bool:
        """Whether the pending calls must come before an op."""
        if call is not None:
            first = self._pending[0].call
            is_alike = (call.options, call.group) == (first.options, first.group)
            return call.key in self._starts or not is_alike or self._needs_pending(op)
        # Effects and communication keep the order in which they were built.
        kind = kind_of(op)
        if placeholder.read(op) is not None or kind.calls:
            return True
        if self._written and self._follows_writes(op, kind):
            return True
        return kind.stateful and self._needs_pending(op) and not self._may_wait(op)

    def _follows_writes(self, op: tf.Operation, kind: Kind) -> bool:
        """Whether an op may have to come after the writes that were delayed."""
        touched = self._touched(op)
        if not touched:
            return kind.effect
        return None in touched or not self._written.isdisjoint(touched)

    def _may_wait(self, op: tf.Operation) -> bool:
        """Whether an op that needs the pending calls is a write that may come later."""
        return op.type in _WRITES and None not in self._touched(op)

    def _touched(self, op: tf.Operation) -> set[int | None]:
        """Returns what identifies each resource of an op; None for an unknown one."""
        return {self._identity(tensor) for _, tensor in resource_inputs(op)}

    def _identity(self, handle: tf.Tensor) -> int | None:
        variable = self._variable_of(handle)
        if variable is not None:
            return id(variable)
        return None if handle.op.inputs else id(handle)

    def _needs_pending(self, op: tf.Operation) -> bool:
        """Whether an op depends on the results of the pending calls."""
        sources = [tensor.op for tensor in op.inputs]
        return not self._waiting.isdisjoint([*sources, *op.control_inputs])

    def flush(self) -> None:
        """Adds the pending calls as one step, and then the delayed ops."""
        if self._pending:
            self.steps.append(self._pending)
        self.steps += self._delayed
        self._pending, self._delayed = [], []
        self._waiting, self._written = set(), set()


def _joinable_call(op: tf.Operation) -> Call | None:
    """Returns the call of an op if it may be joined with others, else None."""
    call = placeholder.read(op)
    if call is None or not call.joinable or op.control_inputs:
        return None
    return call


def _join_calls(parts: _Calls, scope: str) -> tf.Operation:
    """Replaces several calls by one; returns its op."""
    first = parts[0].call
    if len(parts) == 1:
        return parts[0].op
    calls = _calls(parts)
    call = dataclasses.replace(
        first,
        assignment=None,  # the policies tell whose values they are
        operands=tuple(value for call in calls for value in call.operands),
        agreed=tuple(value for call in calls for value in call.agreed),
        policies=tuple(
            call.policy(k) for call in calls for k in range(len(call.operands))
        ),
        merged=tuple(dict.fromkeys(call.line for call in calls[1:])),
    )
    operands = [tensor for part in parts for tensor in part.operands]
    results = [tensor for part in parts for tensor in part.results]
    with tf.name_scope(scope), tf.control_dependencies(None):
        op = placeholder.put(call, operands, [Value.of(result) for result in results])
    for old, new in zip(results, op.outputs, strict=True):
        tf_ops.replace(old, new)
    for part in parts:
        tf_ops.move_control_outputs(part.op, op)
    tf_ops.abandon([part.op for part in parts])
    return op
