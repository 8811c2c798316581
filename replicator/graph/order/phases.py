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
op per device, since an edge between two devices costs a transfer. Gates alone would
cost 5% of a small step. If all ops counted as ones that can fail, so that no list of
those that cannot were needed (fallible.py), steps would take 20 to 30% longer, and all
gradients would be in memory at once.

Runs once per build and per merged function, when all else is in place, in a time that
grows with the number of ops.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Container, Iterable, Mapping, Sequence, Set

import tensorflow as tf

from replicator._tf import ops as tf_ops
from replicator.graph.ir import functional, walk
from replicator.graph.ir.kinds import kind_of
from replicator.graph.order import guards
from replicator.graph.order.effects import may_write
from replicator.graph.order.fallible import FailureAnalysis

_Ops = list[tf.Operation]


def separate(
    roots: Iterable[tf.Operation],
    initializers: Set[tf.Operation],
    ops_before_step: Sequence[tf.Operation] = (),
    end: tf.Operation | None = None,
    fitting: Container[tf.Operation] | None = frozenset(),
) -> list[tf.Operation]:
    """Adds the control edges that keep replicas equal if a step fails.

    Args:
        roots: Ops of one graph that run; with all that they wait for, they are the
            step.
        initializers: Ops that initialize variables, which are not part of the step.
        ops_before_step: Ops that run with the step and come before it in the program:
            another step, for example.
        end: An op for which later ops of the program wait, if they have an effect.
        fitting: Writes of as many rows as there are indices; None if there is only one
            replica, so that a failed write cannot make replicas differ.

    Returns:
        The ops of the step that can fail.
    """
    analysis = FailureAnalysis()
    others = {*initializers, *ops_before_step}
    roots = list(dict.fromkeys(roots))
    if fitting is not None:
        step_ops = [op for op in roots if op not in others]
        roots += guards.add(filter(analysis.writes, step_ops), fitting)
    earlier = [op for op in ops_before_step if op not in initializers]
    failed = [op for op in earlier if kind_of(op).effect and analysis.fails(op)]
    last = failed  # with all for which they wait, what can fail so far
    written = [op for op in earlier if analysis.writes(op)]  # since then
    step = _find(roots, others, analysis)
    failing, writing = _Ops(), _Ops()
    for key in sorted(step.phases):
        phase = step.phases[key]
        fails, writes = analysis.fails(phase[0]), analysis.writes(phase[0])
        if fails:
            _wait(phase, [*written, *(last if writes else [])])
            failing += phase
            last, written = [*failed, *phase], []
        else:
            _wait_for_failing(step, phase, last)
        if writes:
            writing += phase
            written = [*written, *phase]
    if end is not None:
        _wait([end], writing)
    return failing


@dataclasses.dataclass
class _Step:
    """The facts about a step's ops.

    Attributes:
        level: The level of each op, in an order in which they can run.
        phases: The ops that can fail or write, by level and phase.
        bits: A bit for each of the first ops that can fail.
        behind: The bits of those for which each op waits.
    """

    level: dict[tf.Operation, int] = dataclasses.field(default_factory=dict)
    phases: dict[tuple[int, ...], _Ops] = dataclasses.field(default_factory=dict)
    bits: dict[tf.Operation, int] = dataclasses.field(default_factory=dict)
    behind: dict[tf.Operation, int] = dataclasses.field(default_factory=dict)


_FEW = 512  # if more ops can fail, hardly any op waits for all of them anyway


def _find(
    roots: _Ops, others: Container[tf.Operation], analysis: FailureAnalysis
) -> _Step:
    """Finds the ops of a step that can fail or write, and what waits for them.

    Nothing counts as waiting through a call: once the function is inlined, one result
    waits for some of the operands only.

    Args:
        roots: As for `separate`.
        others: Ops that are not part of the step.
        analysis: Tells which ops can fail, and which write.
    """
    sources_of = functools.cache(walk.waits_for)
    ops = walk.in_order(roots, sources_of)
    functional.refuse_raw(ops)  # outside ops, and those of merged functions
    step = _Step()
    writing: set[tf.Operation] = set()
    for op in ops:
        sources = sources_of(op)
        level = max((step.level[s] + (s in writing) for s in sources), default=0)
        behind = functools.reduce(
            operator.or_, map(step.behind.__getitem__, sources), 0
        )
        fails = op not in others and analysis.fails(op)
        writes = op not in others and analysis.writes(op)
        if writes:
            writing.add(op)
        if fails and len(step.bits) < _FEW:
            step.bits[op] = 1 << len(step.bits)
            behind |= step.bits[op]
        if fails or writes:
            number = len(step.level) if fails and writes else 0
            key = (level, writes + (not fails), number)
            step.phases.setdefault(key, []).append(op)
        step.level[op] = level
        step.behind[op] = 0 if kind_of(op).calls else behind
    return step


def _wait_for_failing(step: _Step, writes: _Ops, failing: _Ops) -> None:
    """Makes writes of one level wait for failing ops, unless they do already.

    They wait for an op of their device that does, if there is one.
    """
    if any(op not in step.bits for op in failing):
        _wait(writes, failing)
        return
    needed = sum(step.bits[op] for op in failing)
    level = step.level[writes[0]]
    writes = [op for op in writes if step.behind[op] & needed != needed]
    gates = {
        op.device: op
        for op in (reversed(step.level) if writes else ())
        if step.behind[op] & needed == needed
        and step.level[op] <= level
        and not may_write(op)
    }
    _wait(writes, failing, gates)


def _wait(
    ops: _Ops, before: _Ops, gates: Mapping[str, tf.Operation] | None = None
) -> None:
    """Makes ops wait for others, by a gate on each device.

    Args:
        ops: The ops that wait.
        before: Those for which they wait.
        gates: Ops that wait for all of these, by their devices.
    """
    gates = dict(gates or {})
    missing = list({op.device: None for op in ops if op.device not in gates})
    if missing and before:
        ends = joint(before)
        if len(ends) > 1 and len(missing) > 1:
            ends = [_after(ends, ends[0].device)]
        gates.update({device: _after(ends, device) for device in missing})
    for op in ops:
        if op.device in gates:
            tf_ops.add_control_inputs(op, [gates[op.device]])


def joint(ops: Iterable[tf.Operation]) -> _Ops:
    """Returns an op on each device that runs after those of `ops` that are there."""
    by_device: dict[str, _Ops] = {}
    for end in map(_end, dict.fromkeys(ops)):
        by_device.setdefault(end.device, []).append(end)
    return [_after(ends, device) for device, ends in by_device.items()]


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
                return _after(results, op.device)
            return tf.raw_ops.IdentityN(input=list(op.outputs))[0].op


def _after(ops: _Ops, device: str) -> tf.Operation:
    """Returns an op on a device that does nothing and runs after others."""
    if len(ops) == 1 and ops[0].device == device:
        return ops[0]
    with tf.control_dependencies(None), tf.device(None), tf.device(device):
        with tf.control_dependencies(ops):
            return tf.no_op("gate")
