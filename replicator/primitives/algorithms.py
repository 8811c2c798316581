# SPDX-License-Identifier: Apache-2.0
"""Algorithms that reduce one tensor per replica and give all replicas the result.

Each gives all replicas the same bits, and the same from run to run: every element is
combined once, in an order that depends only on the algorithm and the replicas' hosts.
Hub and shuffled combine in replica order, so their results are bitwise equal. Where
hosts have several replicas, each host's replicas are reduced first, in replica order,
and the algorithm then combines one tensor per host (partials.py).

costs/cost.py chooses among them. The hub does what the chosen algorithm does not
support: tree, ring and nccl do no "argmin" or "argmax", and nccl only the sum, mean,
min, max and prod of floating-point numbers, int32 and int64.

Sources: the ring is that of Patarasuk and Yuan 2009, Bandwidth optimal all-reduce
algorithms for clusters of workstations; "shuffled" is the name in Google's
cross-device operations for the reduce-scatter and all-gather of Thakur, Rabenseifner
and Gropp 2005, Optimization of collective communication operations in MPICH.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import arguments, errors
from replicator.costs import cost, rates
from replicator.graph.lowering.matched import Matched
from replicator.primitives import arithmetic, base, levels, partials, reductions
from replicator.primitives.levels import Received
from replicator.primitives.partials import ReduceTask

# TensorFlow slices a tensor without a copy if the slice starts at a multiple of this.
_ALIGNED_BYTES = 64

_NCCL_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)
_NCCL_OPS = {"sum": "sum", "mean": "sum", "min": "min", "max": "max", "prod": "prod"}


def check(what: str, algorithm: Any) -> None:
    """Raises ArgumentError unless `algorithm` is the name of an algorithm, or None."""
    if not arguments.is_choice(algorithm, (None, *cost.ALGORITHM_NAMES)):
        raise base.bad_argument(
            what,
            f"was given algorithm={errors.repr_of(algorithm)}",
            f"algorithm is one of {', '.join(cost.ALGORITHM_NAMES)}, or None.",
        )


def reduce(matched: Matched, column: Sequence[tf.Tensor], k: int = 0) -> Received:
    """Reduces one tensor per participant by the named or the cheapest algorithm.

    Args:
        matched: The communication; its option "op" is the reduction.
        column: `column[n]` is the tensor of the n-th participant.
        k: The index of the operand, or of the first operand packed into it.

    Returns:
        What each participant receives.

    Raises:
        ArgumentError: The algorithm named by the call does not support the reduction.
    """
    op, dtype = matched.options["op"], column[0].dtype
    named_algorithm, owner = matched.algorithm(k), matched.owner(k)
    requested = named_algorithm or matched.policy.algorithm
    if requested == "nccl":
        _check_gpus(matched)
    if named_algorithm and not supports(named_algorithm, op, dtype):
        raise _unsupported(
            matched, named_algorithm, f"cannot do the {op} of {dtype.name}"
        )
    supported = [name for name in ALGORITHMS if supports(name, op, dtype)]
    hub = matched.hub(cost.tensor_bytes(column[0]), owner)
    leaders = levels.leaders(matched, hub, cost.tensor_bytes(column[0]))
    name = "hub"
    if owner is None:
        leader_devices = [matched.devices[n] for n in leaders]
        name = cost.choose(
            matched.policy,
            requested,
            supported,
            cost.known_bytes(column[0]),
            leader_devices,
        )
    matched.notes.algorithms.append(levels.display_name(matched, name))
    unique_name = f"{matched.calls[0].key}:{column[0].name}"
    task = ReduceTask(
        op=op,
        column=column,
        devices=matched.devices,
        group=matched.group,
        hub=matched.devices.index(hub),
        name=unique_name,
    )
    return partials.all_reduce(task, leaders, ALGORITHMS[name])


def supports(name: str, op: str, dtype: tf.DType) -> bool:
    """Whether an algorithm supports a reduction of tensors of a dtype."""
    if name in ("hub", "shuffled"):
        return True
    if name == "nccl":
        return op in _NCCL_OPS and dtype in _NCCL_DTYPES
    return not reductions.REDUCTIONS[op].located


def hub(task: ReduceTask) -> Received:
    """Reduces on one device, in replica order; all replicas read its result.

    Moves 2 * (replicas - 1) * bytes(value): in to the hub and out again.
    """
    with tf.device(task.devices[task.hub]):
        parts = reductions.combine(task.op, task.column, task.group, task.steps)
    return [parts for _ in task.column]


def shuffled(task: ReduceTask) -> Received:
    """Reduces one slice per device, in replica order; every device joins all slices.

    A reduce-scatter and an all-gather. Moves 2 * (replicas - 1) * bytes(value), as the
    hub does, but no device sends or receives more than the others.
    """
    slices = _slices(task)
    reduced = []
    for k, column in enumerate(zip(*slices, strict=True)):
        with tf.device(task.devices[(task.hub + k) % task.count]):
            reduced.append(reductions.combine(task.op, column, task.group, task.steps))
    parts = list(zip(*reduced, strict=True))
    return [
        [_whole(part, x, device) for part in parts]
        for x, device in zip(task.column, task.devices, strict=True)
    ]


def tree(task: ReduceTask) -> Received:
    """Combines pairs of neighbours, then pairs of pairs; results return the same way.

    Moves 2 * (replicas - 1) * bytes(value), in 2 * log2(replicas) steps.
    """
    steps = task.steps
    results: list[Any] = [None] * task.count

    def leader(low: int, high: int) -> int:
        return task.hub if low <= task.hub < high else low

    def up(low: int, high: int) -> tf.Tensor:
        if high - low == 1:
            with tf.device(task.devices[low]):
                return steps.widen(task.column[low])
        middle = _middle(low, high)
        lower, upper = up(low, middle), up(middle, high)
        with tf.device(task.devices[leader(low, high)]):
            return arithmetic.fold(steps.pair, [lower, upper])

    def down(low: int, high: int, result: tf.Tensor) -> None:
        if high - low == 1:
            results[low] = result
            return
        middle = _middle(low, high)
        for part in ((low, middle), (middle, high)):
            part_leader = leader(*part)
            if part_leader == leader(low, high):
                down(*part, result)
                continue
            with tf.device(task.devices[part_leader]):
                down(*part, arithmetic.hop(result))

    combined = up(0, task.count)
    with tf.device(task.devices[task.hub]):
        down(0, task.count, steps.finish(combined))
    return [[result] for result in results]


def _middle(low: int, high: int) -> int:
    """Returns where to halve a range: the first half is the largest power of two."""
    return low + (1 << (high - low - 1).bit_length() - 1)


def ring(task: ReduceTask) -> Received:
    """Passes slices around a ring twice: to combine them, then to distribute them.

    Each device sends only to the next one, one slice in each of 2 * (replicas - 1)
    steps. Moves 2 * (replicas - 1) * bytes(value). Slice k is combined in the order
    k, k + 1, ..., k - 1.
    """
    steps, count = task.steps, task.count
    slices = _slices(task)
    gathered: list[list[tf.Tensor]] = [[] for _ in task.column]
    for k in range(len(slices[0])):
        order = [(k + step) % count for step in range(count)]
        with tf.device(task.devices[order[0]]):
            partial = steps.widen(slices[order[0]][k])
        for n in order[1:]:
            with tf.device(task.devices[n]):
                operand = steps.widen(slices[n][k])
                partial = arithmetic.fold(steps.pair, [partial, operand])
        with tf.device(task.devices[order[-1]]):
            partial = steps.finish(partial)
        gathered[order[-1]].append(partial)
        for n in order[:-1]:
            with tf.device(task.devices[n]):
                partial = arithmetic.hop(partial)
            gathered[n].append(partial)
    return [
        [_whole(pieces, x, device)]
        for pieces, x, device in zip(gathered, task.column, task.devices, strict=True)
    ]


def nccl(task: ReduceTask) -> Received:
    """Reduces with NVIDIA's NCCL, among the GPUs of one host.

    The library chooses the order of summation; it is the same on all GPUs, and from run
    to run on the same machine. NCCL has no CPU kernel.
    """
    steps, results = task.steps, []
    for x, device in zip(task.column, task.devices, strict=True):
        with tf.device(device):
            reduced = tf.raw_ops.NcclAllReduce(
                input=steps.widen(x),
                reduction=_NCCL_OPS[task.op],
                num_devices=task.count,
                shared_name=f"replicator:{task.name}",
            )
            results.append([steps.finish(reduced)])
    return results


ALGORITHMS: dict[str, Callable[[ReduceTask], Received]] = {
    "hub": hub,
    "shuffled": shuffled,
    "tree": tree,
    "ring": ring,
    "nccl": nccl,
}


def _slices(task: ReduceTask) -> list[list[tf.Tensor]]:
    """Slices each participant's flattened tensor, on its device.

    Returns:
        `slices[n][k]` is the k-th slice of participant n. All have one size but the
        last ones, which may be smaller, or empty if the size is statically unknown.
        There is one per participant, or fewer for a tensor of few elements.
    """
    slices = []
    sizes = {x.shape.num_elements() for x in task.column} - {None}
    size = sizes.pop() if len(sizes) == 1 else None  # unknown sizes are left out
    for x, device in zip(task.column, task.devices, strict=True):
        with tf.device(device):
            flat = tf.reshape(x, [-1])
            unit = max(1, _ALIGNED_BYTES // max(1, x.dtype.size))
            if size is None:
                total = tf.size(flat)
                width = -(-total // (task.count * unit)) * unit
                starts = [tf.minimum(k * width, total) for k in range(task.count)]
                ends = [tf.minimum(start + width, total) for start in starts]
            else:
                width = max(1, -(-size // (task.count * unit)) * unit)
                starts = list(range(0, size, width)) or [0]
                ends = [min(start + width, size) for start in starts]
            slices.append(
                [
                    flat if len(starts) == 1 else tf.slice(flat, [start], [end - start])
                    for start, end in zip(starts, ends, strict=True)
                ]
            )
    return slices


def _whole(slices: Sequence[tf.Tensor], like: tf.Tensor, device: str) -> tf.Tensor:
    """Concatenates slices to a tensor of the shape of `like`, on a device."""
    with tf.device(device):
        flat = tf.concat(slices, 0) if len(slices) > 1 else arithmetic.hop(slices[0])
        is_static = like.shape.is_fully_defined()
        whole = tf.reshape(flat, like.shape if is_static else tf.shape(like))
        return whole if is_static else arithmetic.ensure_shape(whole, like.shape)


def _check_gpus(matched: Matched) -> None:
    """Raises ArgumentError unless NCCL reaches all participants."""
    if not rates.nccl_reaches(matched.devices):
        raise _unsupported(
            matched, "nccl", "needs GPUs on one host, of which none is split"
        )


def _unsupported(matched: Matched, name: str, problem: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"algorithm={name!r} {problem}.",
        [call.site() for call in matched.calls],
        "name another algorithm, or pass None for the cheapest one.",
    )
