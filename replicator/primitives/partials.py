# SPDX-License-Identifier: Apache-2.0
"""Reductions in two levels: within each host, then of what came of that between hosts.

Sums are added up in this order: within each host, in replica order; then between hosts,
as the algorithm does: hub and shuffled in the order in which hosts' first replicas
come. 16-bit floats travel between hosts as sums in float32; of a hub and of shuffled
slices, the result comes back in 16 bits.

Where a reduction is on one host, or no host has several of its replicas, nothing here
adds an op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator.costs import cost, hosts
from replicator.graph.lowering.matched import Matched
from replicator.primitives import arithmetic, levels, reductions
from replicator.primitives.job import Job
from replicator.primitives.levels import Received

# By which reduction the values of extrema come to be, of which the owners are asked.
_VALUES = {"argmin": "min", "argmax": "max"}


def all_reduce(
    job: Job, leaders: Sequence[int], between: Callable[[Job], Received]
) -> Received:
    """Reduces within each host, then between the leaders, who distribute the result.

    Args:
        job: What is to be reduced.
        leaders: What `leaders` returned.
        between: An algorithm, which is all there is if there are no levels.
    """
    if len(leaders) == job.count:
        return between(job)
    if reductions.REDUCTIONS[job.op].located:
        return _extrema(job, leaders, between)
    column = []
    for leader, members in zip(leaders, hosts.by_host(job.devices), strict=True):
        with tf.device(job.devices[leader]):
            own = [job.column[n] for n in members]
            column.append(
                reductions.partial(job.op, own, job.steps)
                if len(own) > 1
                else job.steps.widen(own[0])
            )
    received = between(
        Job(
            job.op,
            column,
            [job.devices[leader] for leader in leaders],
            [job.group[leader] for leader in leaders],
            leaders.index(job.hub),
            job.name,
            job.steps,
        )
    )
    return levels.spread(job.devices, leaders, received)


def _extrema(
    job: Job, leaders: Sequence[int], between: Callable[[Job], Received]
) -> Received:
    """Reduces the values, and then the ids of those that hold them."""
    value_job = dataclasses.replace(job, op=_VALUES[job.op])
    values = all_reduce(value_job, leaders, between)
    ids = []
    for n, (x, (value,)) in enumerate(zip(job.column, values, strict=True)):
        with tf.device(job.devices[n]):
            own = tf.where(reductions.holds(x, value), job.group[n], tf.int32.max)
            ids.append(arithmetic.ensure_shape(own, x.shape))
    owners = all_reduce(
        dataclasses.replace(job, op="min", column=ids), leaders, between
    )
    return [[*value, *owner] for value, owner in zip(values, owners, strict=True)]


def combine(matched: Matched, column: Sequence[tf.Tensor], at: str) -> list[tf.Tensor]:
    """Reduces one tensor per participant on a device.

    Args:
        matched: The communication, whose option "op" says what to do.
        column: `column[n]` is the tensor of the n-th participant.
        at: Where; the device of a participant.

    Returns:
        What `reductions.combine` returns.
    """
    op = matched.options["op"]
    if not hosts.in_levels(matched.devices):
        with tf.device(at):
            return reductions.combine(op, column, matched.group)
    steps = reductions.steps_of(op, column[0].dtype, len(column))
    located = reductions.REDUCTIONS[op].located
    partials = []
    for members in hosts.by_host(matched.devices):
        own = [column[n] for n in members]
        with tf.device(levels.leader(matched, members, at, cost.tensor_bytes(own[0]))):
            if located:
                group = [matched.group[n] for n in members]
                partials.append(reductions.combine(op, own, group))
            elif len(own) > 1:
                partials.append([reductions.partial(op, own, steps)])
            else:
                partials.append(own)
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
    """Adds up what the local replicas have, and then that of all processes.

    Args:
        matched: The communication, whose option "op" says "sum" or "mean".
        column: `column[n]` is the tensor of the n-th local participant.
        when: Whether it is due; None: it always is. What is not is added up all the
            same: the processes would have to agree on it first.
        owner: The participant that needs the result, if only one does.
    """
    assert matched.crossing is not None
    matched.notes.algorithms.append("collective of hosts")
    op, group = matched.options["op"], matched.calls[0].group
    steps = reductions.steps_of(op, column[0].dtype, len(group))
    hub = matched.hub(cost.tensor_bytes(column[0]), owner)
    with tf.device(hub):
        own = reductions.partial(op, column, steps)
    total = matched.crossing.reduce(own)
    with tf.device(hub):
        result = arithmetic.ensure_shape(steps.finish(total), column[0].shape)
        if when is not None:
            result = tf.where(when, result, tf.zeros_like(result))
    return levels.hand_out(matched, [result], hub)
