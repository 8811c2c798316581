# SPDX-License-Identifier: Apache-2.0
"""Reductions in two levels: within each host, then between hosts.

Sums are added up in this order: within each host, in replica order; then between hosts,
in the algorithm's order. Hub and shuffled order the hosts by their first replicas.
16-bit floats travel between hosts as float32 sums; the results of hub and shuffled come
back in 16 bits.

For a reduction on one host, or if no host has several of its replicas, this module adds
no op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator.costs import cost, hosts
from replicator.graph.lowering.matched import Matched
from replicator.primitives import arithmetic, levels, reductions
from replicator.primitives.levels import Received

# The reduction that computes the value whose owner is sought.
_VALUES = {"argmin": "min", "argmax": "max"}


@dataclasses.dataclass(frozen=True)
class ReduceTask:
    """One reduction for all participants.

    Attributes:
        op: One of REDUCTIONS, defined for the dtype.
        column: `column[n]` is the tensor of the n-th participant.
        devices: `devices[n]` is its device.
        group: `group[n]` is its replica's id.
        hub: The participant that does what needs to be done only once.
        name: Unique per communication; used as NCCL's shared_name.
        whole_steps: If `column` holds partial results, one per host: the steps of the
            whole reduction. None: this is the whole reduction.
    """

    op: str
    column: Sequence[tf.Tensor]
    devices: Sequence[str]
    group: Sequence[int]
    hub: int
    name: str = ""
    whole_steps: reductions.Steps | None = None

    @property
    def count(self) -> int:
        """The number of participants."""
        return len(self.column)

    @property
    def steps(self) -> reductions.Steps:
        """The steps of the reduction, which combine pair by pair."""
        if self.whole_steps is not None:
            return self.whole_steps
        return reductions.steps_of(self.op, self.column[0].dtype, self.count)


def all_reduce(
    task: ReduceTask, leaders: Sequence[int], between: Callable[[ReduceTask], Received]
) -> Received:
    """Reduces within each host, then between the leaders, who distribute the result.

    Args:
        task: The reduction.
        leaders: The result of `levels.leaders`.
        between: The algorithm between hosts, or of the whole task if it has one level.
    """
    if len(leaders) == task.count:
        return between(task)
    if reductions.REDUCTIONS[task.op].located:
        return _extrema(task, leaders, between)
    column = []
    for leader, members in zip(leaders, hosts.by_host(task.devices), strict=True):
        with tf.device(task.devices[leader]):
            host_tensors = [task.column[n] for n in members]
            column.append(
                reductions.partial(task.op, host_tensors, task.steps)
                if len(host_tensors) > 1
                else task.steps.widen(host_tensors[0])
            )
    received = between(
        ReduceTask(
            op=task.op,
            column=column,
            devices=[task.devices[leader] for leader in leaders],
            group=[task.group[leader] for leader in leaders],
            hub=leaders.index(task.hub),
            name=task.name,
            whole_steps=task.steps,
        )
    )
    return levels.spread(task.devices, leaders, received)


def _extrema(
    task: ReduceTask, leaders: Sequence[int], between: Callable[[ReduceTask], Received]
) -> Received:
    """Reduces the values, then the ids of the replicas that hold them."""
    value_task = dataclasses.replace(task, op=_VALUES[task.op])
    values = all_reduce(value_task, leaders, between)
    ids = []
    for n, (x, (value,)) in enumerate(zip(task.column, values, strict=True)):
        with tf.device(task.devices[n]):
            holder_ids = tf.where(
                arithmetic.holds(x, value), task.group[n], tf.int32.max
            )
            ids.append(arithmetic.ensure_shape(holder_ids, x.shape))
    owners = all_reduce(
        dataclasses.replace(task, op="min", column=ids), leaders, between
    )
    return [[*value, *owner] for value, owner in zip(values, owners, strict=True)]


def combine(matched: Matched, column: Sequence[tf.Tensor], at: str) -> list[tf.Tensor]:
    """Reduces one tensor per participant on a device.

    Args:
        matched: The communication; its option "op" is the reduction.
        column: `column[n]` is the tensor of the n-th participant.
        at: The device of a participant.

    Returns:
        The result of `reductions.combine`.
    """
    op = matched.options["op"]
    if not hosts.in_levels(matched.devices):
        with tf.device(at):
            return reductions.combine(op, column, matched.group)
    steps = reductions.steps_of(op, column[0].dtype, len(column))
    located = reductions.REDUCTIONS[op].located
    partials = []
    for members in hosts.by_host(matched.devices):
        host_tensors = [column[n] for n in members]
        with tf.device(
            levels.leader(matched, members, at, cost.tensor_bytes(host_tensors[0]))
        ):
            if located:
                group = [matched.group[n] for n in members]
                partials.append(reductions.combine(op, host_tensors, group))
            elif len(host_tensors) > 1:
                partials.append([reductions.partial(op, host_tensors, steps)])
            else:
                partials.append(host_tensors)
    with tf.device(at):
        if located:
            values, owners = zip(*partials, strict=True)
            return reductions.settle(op, values, owners)
        sums = [partial for (partial,) in partials]
        return reductions.combine(op, sums, matched.group, steps)


def across(
    matched: Matched,
    column: Sequence[tf.Tensor],
    when: tf.Tensor | None,
    owner: int | None,
) -> Received:
    """Sums the local replicas' tensors, then these sums over all processes.

    Args:
        matched: The communication; its option "op" is "sum" or "mean".
        column: `column[n]` is the tensor of the n-th local participant.
        when: Whether to reduce at run time; None: always. The sum is computed even if
            it is False, since the processes would otherwise have to agree on it first.
        owner: The participant that needs the result, if only one does.
    """
    assert matched.crossing is not None
    matched.notes.algorithms.append("collective of hosts")
    op, group = matched.options["op"], matched.calls[0].group
    steps = reductions.steps_of(op, column[0].dtype, len(group))
    hub = matched.hub(cost.tensor_bytes(column[0]), owner)
    with tf.device(hub):
        local_sum = reductions.partial(op, column, steps)
    total = matched.crossing.reduce(local_sum)
    with tf.device(hub):
        result = arithmetic.ensure_shape(steps.finish(total), column[0].shape)
        if when is not None:
            result = tf.where(when, result, tf.zeros_like(result))
    return levels.distribute(matched, [result], hub)
