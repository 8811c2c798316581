# SPDX-License-Identifier: Apache-2.0
"""In which order a step does what it does besides computing.

Side effects keep their program order inside a replica, and only there: TensorFlow's own
order runs across replicas and would make a cycle with the communication. Runs once per
build, after everything is rewired, on the ops of each replica with the merged ones in
the places of those that they replace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import switching
from replicator.graph.ir.kinds import has_effect, kind_of, resource_inputs, touched


@dataclasses.dataclass
class _Order:
    """What the ops so far did to each resource; None stands for all that has none.

    Attributes:
        last_write: The last op that wrote.
        reads: The ops that have read since.
    """

    last_write: dict[object, tf.Operation] = dataclasses.field(default_factory=dict)
    reads: dict[object, list[tf.Operation]] = dataclasses.field(default_factory=dict)

    def copy(self) -> _Order:
        """Returns an order that goes on from here by itself."""
        reads = {key: list(ops) for key, ops in self.reads.items()}
        return _Order(dict(self.last_write), reads)

    def enter(self, op: tf.Operation) -> set[tf.Operation]:
        """Notes what `op` does; returns the ops that have to come before it."""
        return self.note(op, *touched(op))

    def note(
        self, op: tf.Operation, read: set[int], written: set[int]
    ) -> set[tf.Operation]:
        """Does what `enter` does, for an op of which is known what it touches."""
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
    """Returns ops that initialise variables with those that compute initial values.

    A slot starts from what its variable starts from, which is read with the slot's
    initialiser and must not wait for what the step assigns.

    Args:
        initializers: Ops that create and initialise variables.
        replicas: `replicas[r]` are the ops of replica r.
    """
    found = set(initializers)
    stack = [op for ops in replicas for op in ops if op in found]
    own = {op for ops in replicas for op in ops} if stack else set()
    while stack:
        for source in [tensor.op for tensor in stack.pop().inputs]:
            if source in own and source not in found:
                found.add(source)
                stack.append(source)
    return found


def _put_in_order(
    ops: Sequence[tf.Operation],
    order: _Order,
    initializers: Set[tf.Operation],
    flow: switching.Flow = switching.NONE,
) -> list[tf.Operation]:
    """Puts the effects of one replica in program order; returns those that must run."""
    must_run = []
    for op in ops:
        if op in initializers:
            continue
        read, written = touched(op)
        if op in flow:
            outside = {id(t): id(flow.handle(t)) for _, t in resource_inputs(op)}
            read, written = ({outside[key] for key in x} for x in (read, written))
        before = order.note(op, read, written)
        flow.let_wait(op, sorted(before, key=lambda o: o.name))
        if kind_of(op).effect and (written or not read):
            must_run.append(op)
    return must_run


def order_in_session(
    replicas: Sequence[Sequence[tf.Operation]],
    lowered: Sequence[tf.Operation],
    initializers: Set[tf.Operation],
    flow: switching.Flow,
) -> list[tf.Operation]:
    """Puts the effects of each replica in program order, in a plain tf.Graph.

    There, nothing orders what a step does, and nothing runs what is not fetched.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order.
        lowered: The ops that communicate in their stead.
        initializers: Ops that initialise variables, which are no part of the step.
        flow: What of it is in control flow of TensorFlow 1.

    Returns:
        The ops that must run in each step, where their sides are taken.
    """
    must_run = [
        op
        for ops in replicas
        for op in _put_in_order(ops, _Order(), initializers, flow)
    ]
    return list(
        dict.fromkeys([*must_run, *(op for op in lowered if kind_of(op).effect)])
    )


def order_as_created(
    ops: Sequence[tf.Operation], independent: Set[tf.Operation]
) -> list[tf.Operation]:
    """Puts the effects in a function in the order in which the ops were created.

    As TensorFlow does in each tf.function, which looks closer at each of the many ops
    that have no effect.

    Args:
        ops: All ops of the function, in that order.
        independent: Those whose place is told already.

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
            _tf.add_control_inputs(op, list(order.enter(op)))
        if has_effect(op):
            must_run.append(op)
    return must_run


def order_in_function(
    replicas: Sequence[Sequence[tf.Operation]],
    lowered: Sequence[tf.Operation],
    merged: Set[tf.Operation],
    earlier: Sequence[tf.Operation],
    initializers: Set[tf.Operation],
    sharing: bool = False,
) -> dict[tf.Operation, set[tf.Operation]]:
    """Puts the effects of each replica in program order, in a function being traced.

    There, TensorFlow orders what touches a resource as the ops were created, which is
    left to it: components of variables belong to one replica each. Not so

    - effects that touch no resource (prints, assertions, Python calls), and those on a
      resource that several replicas write (a hash table);
    - merged ops, which were created at the end and not where they are in the program.
      Where there are some that touch a resource, nothing is left to TensorFlow;
    - what touches variables that one replica owns and all share, which all replicas
      read before it writes.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order.
        lowered: The ops that communicate in their stead.
        merged: The ops among all of them that several replicas share.
        earlier: The ops that are in the function before the step.
        initializers: Ops that initialise variables, which are no part of the step.
        sharing: Whether replicas share variables.

    Returns:
        What TensorFlow will let ops wait for, of what is left to it.
    """
    left: dict[tf.Operation, set[tf.Operation]] = {}
    if sharing or any(map(resource_inputs, merged)):
        chains = _order_all(replicas, earlier, initializers)
    else:
        chains = _order_chains(replicas)
        for ops in replicas:
            order = _Order()
            left.update({op: order.enter(op) for op in ops if op not in initializers})
    for op in [op for op in lowered if kind_of(op).effect]:
        _tf.run_independently(op.graph, op)
        chains.append([op])
    if chains:
        # Between these two, which TensorFlow puts in order with what is before and
        # after the step.
        first, last = marker("begin"), marker("end")
        for chain in chains:
            _tf.add_control_inputs(chain[0], [first])
        _tf.add_control_inputs(last, [chain[-1] for chain in chains])
    return left


def _order_chains(
    replicas: Sequence[Sequence[tf.Operation]],
) -> list[list[tf.Operation]]:
    """Orders effects without a resource, or on a shared one; returns them."""
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
            _tf.run_independently(op.graph, op)
            if chain:
                _tf.add_control_inputs(op, [chain[-1]])
            chain.append(op)
        if chain:
            chains.append(chain)
    return chains


def _order_all(
    replicas: Sequence[Sequence[tf.Operation]],
    earlier: Sequence[tf.Operation],
    initializers: Set[tf.Operation],
) -> list[list[tf.Operation]]:
    """Orders all effects; returns those of each replica that touch no resource."""
    start = _Order()
    for op in earlier:
        start.enter(op)
    start.last_write.pop(None, None)  # the markers see to that
    chains: list[list[tf.Operation]] = []
    resources: dict[object, tf.Tensor] = {}
    users: dict[object, list[tf.Operation]] = {}
    for ops in replicas:
        order = start.copy()
        must_run = _put_in_order(ops, order, initializers)
        for op in ops:
            if has_effect(op) and op not in initializers:
                _tf.run_independently(op.graph, op)
                resources.update({id(t): t for _, t in resource_inputs(op)})
        for key in resources:
            users.setdefault(key, []).extend(order.since_the_last_write(key))
        chain = [op for op in must_run if not resource_inputs(op)]
        if chain:
            chains.append(chain)
    # To TensorFlow these write the resources, once the step has: what follows waits.
    for key, resource in resources.items():
        with tf.control_dependencies(None), tf.control_dependencies(users[key]):
            tf.identity(resource)
    return chains


def marker(name: str) -> tf.Operation:
    """Returns an op that does nothing, but counts as an effect that touches nothing.

    What has such an effect, and is built into a function later, runs after it.
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
    return {resource for resource, who in users.items() if len(who) > 1}


def _written_by_several(replicas: Sequence[Sequence[tf.Operation]]) -> set[int]:
    """Returns the ids of the resources that more than one replica writes."""
    # Few resources are shared, so few ops are asked what they write, which is slow.
    shared = used_by_several(replicas)
    writers: dict[int, set[int]] = {}
    for r, ops in enumerate(replicas) if shared else ():
        for op in ops:
            if any(id(tensor) in shared for _, tensor in resource_inputs(op)):
                for resource in _tf.resources_touched(op)[1]:
                    writers.setdefault(resource, set()).add(r)
    return {resource for resource, who in writers.items() if len(who) > 1}
