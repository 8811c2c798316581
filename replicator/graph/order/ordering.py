# SPDX-License-Identifier: Apache-2.0
"""The order in which the side effects of a step happen.

Side effects keep their program order within a replica, and only there: TensorFlow's own
order runs across replicas and would form a cycle with the communication. Runs once per
build, after everything is rewired, on the ops of each replica with merged ops in the
places of those that they replace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

import tensorflow as tf

from replicator._tf import effects
from replicator._tf import ops as tf_ops
from replicator.graph.ir import walk
from replicator.graph.ir.kinds import has_effect, kind_of, resource_inputs, touched


@dataclasses.dataclass
class _Order:
    """The accesses to each resource so far; None stands for effects without a resource.

    Attributes:
        last_write: The last op that wrote.
        reads: The ops that have read since.
    """

    last_write: dict[object, tf.Operation] = dataclasses.field(default_factory=dict)
    reads: dict[object, list[tf.Operation]] = dataclasses.field(default_factory=dict)

    def copy(self) -> _Order:
        """Returns an independent copy."""
        reads = {key: list(ops) for key, ops in self.reads.items()}
        return _Order(dict(self.last_write), reads)

    def enter(self, op: tf.Operation) -> set[tf.Operation]:
        """Records what `op` does; returns the ops that must come before it."""
        read, written = touched(op)
        uses: list[tuple[object, bool]] = [(key, False) for key in read]
        uses += [(key, True) for key in written]
        if not uses and kind_of(op).effect:
            uses = [(None, True)]
        before: set[tf.Operation] = set()
        for key, writes in uses:
            if key in self.last_write:
                before.add(self.last_write[key])
            if writes:
                before.update(self.reads.pop(key, ()))
                self.last_write[key] = op
            else:
                self.reads.setdefault(key, []).append(op)
        before.discard(op)
        return before

    def since_the_last_write(self, key: object) -> list[tf.Operation]:
        """Returns the last op that wrote, and those that have read since."""
        last = [self.last_write[key]] if key in self.last_write else []
        return last + self.reads.get(key, [])


def with_sources(
    initializers: Set[tf.Operation], replicas: Sequence[Sequence[tf.Operation]]
) -> set[tf.Operation]:
    """Adds to ops that initialize variables those that compute initial values.

    A slot starts from its variable's initial value, which is read with the slot's
    initializer and must not wait for the step's assignments.

    Args:
        initializers: Ops that create and initialize variables.
        replicas: `replicas[r]` are the ops of replica r.
    """
    step_ops = {op for ops in replicas for op in ops} if initializers else set()
    return {*initializers, *walk.upstream(initializers, walk.computed_from, step_ops)}


def _put_in_order(
    ops: Sequence[tf.Operation],
    order: _Order,
    initializers: Set[tf.Operation],
) -> list[tf.Operation]:
    """Puts one replica's effects in program order; returns the ops that must run."""
    must_run = []
    for op in ops:
        if op in initializers:
            continue
        tf_ops.add_control_inputs(op, sorted(order.enter(op), key=lambda o: o.name))
        if has_effect(op):
            must_run.append(op)
    return must_run


def order_in_session(
    replicas: Sequence[Sequence[tf.Operation]],
    lowered: Sequence[tf.Operation],
    initializers: Set[tf.Operation],
) -> list[tf.Operation]:
    """Puts each replica's effects in program order, in a plain tf.Graph.

    There, nothing else orders effects, and ops that are not fetched do not run.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order.
        lowered: The ops that implement their communication.
        initializers: Ops that initialize variables, which are not part of the step.

    Returns:
        The ops that must run in each step.
    """
    must_run = [
        op for ops in replicas for op in _put_in_order(ops, _Order(), initializers)
    ]
    return list(
        dict.fromkeys([*must_run, *(op for op in lowered if kind_of(op).effect)])
    )


def order_as_created(
    ops: Sequence[tf.Operation], independent: Set[tf.Operation]
) -> list[tf.Operation]:
    """Puts the effects in a function in the order in which the ops were created.

    TensorFlow does so in each tf.function, but examines each of the many ops that have
    no effect more closely.

    Args:
        ops: All ops of the function, in that order.
        independent: Those that are ordered already.

    Returns:
        The ops that must run.
    """
    order = _Order()
    must_run = []
    for op in ops:
        if op in independent:
            must_run.append(op)
            continue
        kind = kind_of(op)
        if kind.effect or kind.resources:
            tf_ops.add_control_inputs(op, list(order.enter(op)))
        if has_effect(op):
            must_run.append(op)
    return must_run


def order_in_function(
    replicas: Sequence[Sequence[tf.Operation]],
    lowered: Sequence[tf.Operation],
    ops_before_step: Sequence[tf.Operation],
    initializers: Set[tf.Operation],
    is_last: bool,
) -> None:
    """Puts each replica's effects in program order, in a function being traced.

    Nothing of the step is left to TensorFlow, which would order ops as they were
    created, across replicas: merged ops at the end, and a variable that all replicas
    share would be written by its owner before later replicas read it.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order.
        lowered: The ops that implement their communication.
        ops_before_step: The ops that are in the function before the step.
        initializers: Ops that initialize variables, which are not part of the step.
        is_last: Whether nothing in the function follows the step.
    """
    start = _Order()
    for op in ops_before_step:
        start.enter(op)
    start.last_write.pop(None, None)  # the markers order these
    chains = []
    for op in [op for op in lowered if kind_of(op).effect]:
        effects.run_independently(op.graph, op)
        chains.append([op])
    orders = []
    resources: dict[object, tf.Tensor] = {}
    for ops in replicas:
        order = start.copy()
        must_run = _put_in_order(ops, order, initializers)
        orders.append(order)
        chains.append([op for op in must_run if not resource_inputs(op)])
        resources.update({id(t): t for op in must_run for _, t in resource_inputs(op)})
        for op in must_run:
            effects.run_independently(op.graph, op)
    # To TensorFlow these write the resources after the step: later ops wait for them.
    for key, resource in resources.items() if not is_last else ():
        users = [op for order in orders for op in order.since_the_last_write(key)]
        with tf.control_dependencies(None), tf.control_dependencies(users):
            tf.identity(resource)
    _between_markers([chain for chain in chains if chain])


def _between_markers(chains: Sequence[Sequence[tf.Operation]]) -> None:
    """Has TensorFlow order chains with the effects before and after the step."""
    if chains:
        first, last = marker("begin"), marker("end")
        for chain in chains:
            tf_ops.add_control_inputs(chain[0], [first])
        tf_ops.add_control_inputs(last, [chain[-1] for chain in chains])


def marker(name: str) -> tf.Operation:
    """Returns an op that does nothing, but counts as an effect without a resource.

    Ops with such an effect that are built into a function later run after it.
    """
    with tf.control_dependencies(None):
        return tf.raw_ops.Assert(condition=True, data=[name], name=name)
