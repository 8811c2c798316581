# SPDX-License-Identifier: Apache-2.0
"""Orders ops that can fail before writes on all replicas: errors leave them equal.

An error on one device stops the others wherever they are; if one of them had written a
variable and another had not, their components would differ from then on. So a step is
divided into phases, in which nothing fails while variables are being written:

- the level of an op is the length of the longest chain of writes on which it depends;
- on each level, on all replicas, ops that can fail come first, then ops that both write
  and can fail (a merged conditional or loop, which keeps the same order inside), one
  after the other, and then all other writes;
- a write that can itself fail is guarded by an op that fails in its place (guards.py);
- ops that can fail on a level come after all writes of the levels below.

A step that fails on level 0, where almost all of a step is, has thus changed nothing.
Along every edge, neither levels nor, within a level, phases decrease, so no edge that
is added here can close a cycle.

Most writes depend on all that can fail, through the reduced gradients; they need no
edge. The others wait for an op on their own device that does, or else for a gate: one
op per device, since an edge between two devices costs a transfer.

Runs once per build and per merged function, when all else is in place, in a time that
grows with the number of ops.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence, Set

import tensorflow as tf

from replicator._tf import ops as tf_ops
from replicator.graph.ir import functional, walk
from replicator.graph.ir.kinds import kind_of
from replicator.graph.order import guards
from replicator.graph.order.fallible import FailureAnalysis

_Ops = Sequence[tf.Operation]


@dataclasses.dataclass
class _Step:
    """The facts about a step's ops.

    Attributes:
        ops: All ops, each after those for which it waits.
        sources: The ops for which each op waits.
        level: The level of each op.
        failing: The ops that can fail.
        writing: The ops that write variables.
        covered: For each op, the failing ops of `last` for which it waits, as bits.
        last: The failing ops for which no other failing op of their level waits, and
            their bits.
    """

    ops: list[tf.Operation]
    sources: dict[tf.Operation, list[tf.Operation]]
    level: dict[tf.Operation, int] = dataclasses.field(default_factory=dict)
    failing: dict[tf.Operation, None] = dataclasses.field(default_factory=dict)
    writing: dict[tf.Operation, None] = dataclasses.field(default_factory=dict)
    covered: dict[tf.Operation, int] = dataclasses.field(default_factory=dict)
    last: dict[tf.Operation, int] = dataclasses.field(default_factory=dict)


def separate(
    roots: Iterable[tf.Operation],
    before: Mapping[tf.Operation, Iterable[tf.Operation]],
    initializers: Set[tf.Operation],
    ops_before_step: Sequence[tf.Operation] = (),
    end: tf.Operation | None = None,
    fitting: Container[tf.Operation] | None = None,
) -> list[tf.Operation]:
    """Adds the control edges that keep replicas equal if a step fails.

    Args:
        roots: Ops of one graph that run; with all that they wait for, they are the
            step.
        before: Further ops that an op will be made to wait for.
        initializers: Ops that initialize variables, which are not part of the step.
        ops_before_step: Ops that run with the step and come before it in the program:
            another step, for example.
        end: An op for which later ops of the program wait, if they have an effect.
        fitting: Writes of as many rows as there are indices; None if there is only one
            replica, so that a failed write cannot make replicas differ.

    Returns:
        Ops that must run in a function that holds these ops, so that whatever waits for
        a call of it waits for all that can fail.
    """
    analysis = FailureAnalysis()
    others = {*initializers, *ops_before_step}
    step = _find(roots, before, others, analysis)
    if fitting is not None:
        guarding = guards.add(list(step.writing), step.level, fitting)
        if guarding:
            step = _find([*roots, *guarding], before, others, analysis)
    _follow(step, [op for op in ops_before_step if op not in initializers], analysis)
    if end is not None and step.writing:
        gates = _gates(step.writing, [end.device], "all_written")
        tf_ops.add_control_inputs(end, list(gates.values()))
    if not step.failing:
        return []
    _find_last(step)
    if step.writing:
        _fail_before_writes(step)
        _fail_after_writes(step)
    return list(map(_end, step.last))


def _find(
    roots: Iterable[tf.Operation],
    before: Mapping[tf.Operation, Iterable[tf.Operation]],
    others: Container[tf.Operation],
    analysis: FailureAnalysis,
) -> _Step:
    """Finds the ops of a step that can fail, those that write, and all their levels."""
    step = _sorted(roots, before)
    functional.refuse_raw(step.ops)  # outside ops, too, and those of merged functions
    for op in step.ops:
        if op in others:
            continue
        if analysis.writes(op):
            step.writing[op] = None
        if analysis.fails(op):
            step.failing[op] = None
    for op in step.ops:
        step.level[op] = max(
            (step.level[s] + (s in step.writing) for s in step.sources[op]), default=0
        )
    return step


def _sorted(
    roots: Iterable[tf.Operation],
    before: Mapping[tf.Operation, Iterable[tf.Operation]],
) -> _Step:
    """Finds all ops that run, each after all that it waits for."""
    sources_of: dict[tf.Operation, list[tf.Operation]] = {}

    def sources(op: tf.Operation) -> list[tf.Operation]:
        sources_of[op] = [*walk.waits_for(op), *before.get(op, ())]
        return sources_of[op]

    return _Step(walk.in_order(roots, sources), sources_of)


def _follow(step: _Step, ops_before_step: _Ops, analysis: FailureAnalysis) -> None:
    """Orders a step after earlier ops in the same function, as far as needed.

    Ops that can fail wait for the writes among the earlier ops, and writes wait for
    those that can fail and have an effect; ops that only compute results may run later.
    """
    written = [op for op in ops_before_step if analysis.writes(op)]
    failing = [
        op for op in ops_before_step if kind_of(op).effect and analysis.fails(op)
    ]
    for sources, ops in ((written, step.failing), (failing, step.writing)):
        devices = list({op.device: None for op in ops})
        gates = _gates(sources, devices, "step_before")
        for op in ops if sources else ():
            tf_ops.add_control_inputs(op, [gates[op.device]])


def _find_last(step: _Step) -> None:
    """Finds the last ops that can fail on each level, and the ops that wait for them.

    Nothing counts as waiting through a call: once the function is inlined, one result
    waits for some of the operands only.
    """
    never = 1 + max(step.level.values())
    lowest = dict.fromkeys(step.ops, never)  # level of failing ops that wait for it
    calls = {op for op in step.ops if kind_of(op).calls}
    for op in reversed(step.ops):
        level = lowest[op]
        if op in step.failing:
            if level > step.level[op] or op in calls:
                step.last[op] = 1 << len(step.last)
            level = step.level[op]
        for source in step.sources[op] if op not in calls else ():
            if level < lowest[source]:
                lowest[source] = level
    for op in step.ops if len(step.last) <= _FEW else ():
        covered = step.last.get(op, 0)
        for source in step.sources[op]:
            covered |= step.covered[source]
        step.covered[op] = 0 if op in calls else covered


_FEW = 512  # if there are more last failing ops, hardly any write waits for all anyway


def _fail_before_writes(step: _Step) -> None:
    """Makes the writes of each level wait for all that can fail on it and below."""
    for level in sorted({step.level[op] for op in step.writing}):
        writes = [op for op in step.writing if step.level[op] == level]
        failing = [op for op in step.last if step.level[op] <= level]
        both = [op for op in writes if op in step.failing]
        others = [op for op in failing if op not in both]
        _wait(step, both, others, level)
        for first, second in itertools.pairwise(both):
            tf_ops.add_control_inputs(second, [_end(first)])
        # The last of them waits for the others, and for all that those wait for.
        only_write = [op for op in writes if op not in step.failing]
        _wait(step, only_write, both[-1:] or others, level)


def _wait(step: _Step, writes: _Ops, failing: _Ops, level: int) -> None:
    """Makes writes of a level wait for failing ops, unless they do already."""
    needed = sum(step.last[op] for op in failing)
    waiting: dict[str, list[tf.Operation]] = {}
    for op in writes:
        if not step.covered or step.covered[op] & needed != needed:
            waiting.setdefault(op.device, []).append(op)
    if not waiting or not failing:
        return
    gates = _existing_gates(step, waiting.keys(), needed, level) if step.covered else {}
    missing = [device for device in waiting if device not in gates]
    if missing:
        gates.update(_gates(failing, missing, "nothing_failed"))
    for device, ops in waiting.items():
        for op in ops:
            tf_ops.add_control_inputs(op, [gates[device]])


def _existing_gates(
    step: _Step, devices: Iterable[str], needed: int, level: int
) -> dict[str, tf.Operation]:
    """Finds an op on each device that waits for what is needed, if there is one."""
    gates: dict[str, tf.Operation] = {}
    missing = set(devices)
    for op in step.ops:
        if not missing:
            break
        if step.covered[op] & needed != needed or step.level[op] > level:
            continue
        if op in step.writing:
            continue
        if op.device in missing:
            gates[op.device] = op
            missing.remove(op.device)
    return gates


def _fail_after_writes(step: _Step) -> None:
    """Makes ops that can fail wait for all writes of the levels below theirs."""
    above: dict[tf.Operation, int] = {}  # the highest level of failing ops before it
    first: dict[int, list[tf.Operation]] = {}
    for op in step.ops:
        highest = max(
            (
                max(above[s], step.level[s] if s in step.failing else -1)
                for s in step.sources[op]
            ),
            default=-1,
        )
        above[op] = highest
        if op in step.failing and 0 < step.level[op] != highest:
            first.setdefault(step.level[op], []).append(op)
    done = -1
    for level in sorted(first):
        writes = [op for op in step.writing if done <= step.level[op] < level]
        devices = dict.fromkeys(op.device for op in first[level])
        gates = _gates(writes, list(devices), "all_written")
        for op in first[level]:
            tf_ops.add_control_inputs(op, [gates[op.device]])
        done = level


def _gates(
    ops: Iterable[tf.Operation], devices: Sequence[str], name: str
) -> dict[str, tf.Operation]:
    """Adds an op on each device that waits for ops on any device; returns them."""
    by_device: dict[str, list[tf.Operation]] = {}
    for end in map(_end, ops):
        by_device.setdefault(end.device, []).append(end)
    joint = [
        _after(device_ops, device, name) for device, device_ops in by_device.items()
    ]
    if len(joint) > 1 and len(devices) > 1:
        joint = [_after(joint, joint[0].device, name)]
    return {device: _after(joint, device, name) for device in devices}


def _end(op: tf.Operation) -> tf.Operation:
    """Returns an op that runs when an op is completely done.

    When a function is inlined, ops that wait for its call wait for its effects only,
    and ops that use one result wait for no other. Merged functions, which are on no
    device, count all that can fail among their effects.
    """
    if not (op.device and op.outputs and kind_of(op).calls):
        return op
    with tf.control_dependencies(None), tf.device(None), tf.device(op.device):
        with tf.control_dependencies([op]):
            # TensorFlow adds results to calls that it differentiates, but no shapes of
            # them, which IdentityN requires.
            if any(result.shape.rank is None for result in op.outputs):
                results = [tf.identity(result).op for result in op.outputs]
                return _after(results, op.device, "end")
            return tf.raw_ops.IdentityN(input=list(op.outputs))[0].op


def _after(ops: _Ops, device: str, name: str) -> tf.Operation:
    """Returns an op on a device that does nothing and runs after others."""
    if len(ops) == 1 and ops[0].device == device:
        return ops[0]
    with tf.control_dependencies(None), tf.device(None), tf.device(device):
        with tf.control_dependencies(ops):
            return tf.no_op(name)
