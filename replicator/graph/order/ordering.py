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
        return self.note(op, *touched(op))

    def note(
        self, op: tf.Operation, read: set[int], written: set[int]
    ) -> set[tf.Operation]:
        """Does the same as `enter`, for an op whose accesses are known."""
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
    merged: Set[tf.Operation],
    ops_before_step: Sequence[tf.Operation],
    initializers: Set[tf.Operation],
    sharing: bool = False,
) -> dict[tf.Operation, set[tf.Operation]]:
    """Puts each replica's effects in program order, in a function being traced.

    There, TensorFlow orders ops that touch a resource as they were created, and is left
    to do so: components of variables belong to one replica each. Exceptions are

    - effects that touch no resource (prints, assertions, Python calls), and those on a
      resource that several replicas write (a hash table);
    - merged ops, which were created at the end and not at their place in the program.
      If any of them touches a resource, nothing is left to TensorFlow;
    - ops on variables that one replica owns and all share, which all replicas read
      before the owner writes.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order.
        lowered: The ops that implement their communication.
        merged: The ops among all of these that several replicas share.
        ops_before_step: The ops that are in the function before the step.
        initializers: Ops that initialize variables, which are not part of the step.
        sharing: Whether replicas share variables.

    Returns:
        For ops that are left to TensorFlow, those for which it will make them wait.
    """
    waits: dict[tf.Operation, set[tf.Operation]] = {}
    if sharing or any(map(resource_inputs, merged)):
        chains = _order_all(replicas, ops_before_step, initializers)
    else:
        chains = _order_chains(replicas)
        for ops in replicas:
            order = _Order()
            waits.update({op: order.enter(op) for op in ops if op not in initializers})
    for op in [op for op in lowered if kind_of(op).effect]:
        effects.run_independently(op.graph, op)
        chains.append([op])
    if chains:
        # Between two markers, which TensorFlow orders with the effects before and
        # after the step.
        first, last = marker("begin"), marker("end")
        for chain in chains:
            tf_ops.add_control_inputs(chain[0], [first])
        tf_ops.add_control_inputs(last, [chain[-1] for chain in chains])
    return waits


def _order_chains(
    replicas: Sequence[Sequence[tf.Operation]],
) -> list[list[tf.Operation]]:
    """Orders effects without a resource, or on a shared one; returns the chains."""
    shared = _written_by_several(replicas)
    chains = []
    for ops in replicas:
        chain: list[tf.Operation] = []
        for op in ops:
            if not kind_of(op).effect:
                continue
            resources = {id(tensor) for _, tensor in resource_inputs(op)}
            if resources and not resources & shared:
                continue
            effects.run_independently(op.graph, op)
            if chain:
                tf_ops.add_control_inputs(op, [chain[-1]])
            chain.append(op)
        if chain:
            chains.append(chain)
    return chains


def _order_all(
    replicas: Sequence[Sequence[tf.Operation]],
    ops_before_step: Sequence[tf.Operation],
    initializers: Set[tf.Operation],
) -> list[list[tf.Operation]]:
    """Orders all effects; returns each replica's chain of those without a resource."""
    start = _Order()
    for op in ops_before_step:
        start.enter(op)
    start.last_write.pop(None, None)  # the markers order these
    chains: list[list[tf.Operation]] = []
    resources: dict[object, tf.Tensor] = {}
    users: dict[object, list[tf.Operation]] = {}
    for ops in replicas:
        order = start.copy()
        must_run = _put_in_order(ops, order, initializers)
        for op in ops:
            if has_effect(op) and op not in initializers:
                effects.run_independently(op.graph, op)
                resources.update({id(t): t for _, t in resource_inputs(op)})
        for key in resources:
            users.setdefault(key, []).extend(order.since_the_last_write(key))
        chain = [op for op in must_run if not resource_inputs(op)]
        if chain:
            chains.append(chain)
    # To TensorFlow these write the resources after the step: later ops wait for them.
    for key, resource in resources.items():
        with tf.control_dependencies(None), tf.control_dependencies(users[key]):
            tf.identity(resource)
    return chains


def marker(name: str) -> tf.Operation:
    """Returns an op that does nothing, but counts as an effect without a resource.

    Ops with such an effect that are built into a function later run after it.
    """
    with tf.control_dependencies(None):
        return tf.raw_ops.Assert(condition=True, data=[name], name=name)


def used_by_several(replicas: Sequence[Sequence[tf.Operation]]) -> set[int]:
    """Returns the ids of the resources that more than one replica uses.

    Args:
        replicas: `replicas[r]` are the ops of replica r.
    """
    users: dict[int, set[int]] = {}
    for r, ops in enumerate(replicas):
        for op in ops:
            for _, tensor in resource_inputs(op):
                users.setdefault(id(tensor), set()).add(r)
    return {resource for resource, replica_ids in users.items() if len(replica_ids) > 1}


def _written_by_several(replicas: Sequence[Sequence[tf.Operation]]) -> set[int]:
    """Returns the ids of the resources that more than one replica writes."""
    # Asking an op what it writes is slow, but few resources are shared.
    shared = used_by_several(replicas)
    writers: dict[int, set[int]] = {}
    for r, ops in enumerate(replicas) if shared else ():
        for op in ops:
            if any(id(tensor) in shared for _, tensor in resource_inputs(op)):
                for resource in effects.resources_touched(op)[1]:
                    writers.setdefault(resource, set()).add(r)
    return {
        resource for resource, replica_ids in writers.items() if len(replica_ids) > 1
    }
