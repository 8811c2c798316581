# SPDX-License-Identifier: Apache-2.0
"""Communicates between processes that each build their own graph.

Processes exchange data by TensorFlow's collectives, with one member per process, which
match by keys derived from the plan on which all processes agreed before. `gather` gives
each process what the others pass, bit for bit, and it computes its replicas' results
from that as if it had built all replicas. Large sums use `reduce`, which moves less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.costs import hosts
from replicator.graph.ir import shapes
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import Call, Value
from replicator.graph.lowering import words
from replicator.graph.matching.elsewhere import DYNAMIC, Elsewhere

# Pieces into which TensorFlow splits a reduction to overlap computation and transfer:
# 64 MiB at 1 Gbit/s took 633 ms in four, 747 ms in one.
_PIECES = 4
# The dtypes that TensorFlow sums; 16-bit floats are summed as float32.
_ADDED = ("float16", "bfloat16", "float32", "float64", "int32", "int64")


@dataclasses.dataclass
class Crossing:
    """This process's channel to the others that take part in one communication.

    Attributes:
        processes: The processes that take part, ascending.
        process: This process.
        device: Where this process sends and receives.
        group_key: Identifies the group of processes.
        order: `order[k]` is the process whose part comes k-th in a gathered tensor,
            among all processes.
        key: The next collective key.
        sent: The bytes that this process passes to each other process, for plans.
        messages: The number of collectives in which it passes them.
        factors: The operands reduced by their factors, with each process's number of
            rows.
    """

    processes: tuple[int, ...]
    process: int
    device: str
    group_key: int
    order: tuple[int, ...]
    key: int
    sent: int = 0
    messages: int = 0
    factors: Mapping[int, Sequence[int | None]] = dataclasses.field(
        default_factory=dict
    )

    def _next(self, nbytes: int, count: int = 1) -> dict[str, Any]:
        """Returns the arguments of the next collective, and counts it.

        Args:
            nbytes: The number of bytes that it sends.
            count: The number of keys that it needs.
        """
        self.key += count
        self.sent += nbytes
        self.messages += 1
        return {
            "group_size": len(self.processes),
            "group_key": self.group_key,
            "instance_key": self.key - count,
            "ordering_token": [],
        }

    def gather(self, bits: tf.Tensor) -> dict[int, tf.Tensor]:
        """Gathers an int32 vector from each process, all of one static size."""
        arguments = self._next(bits.shape.num_elements() * words.BYTES)
        with tf.device(self.device):
            return self._parts(tf.raw_ops.CollectiveGatherV2(input=bits, **arguments))

    def gather_any(self, bits: tf.Tensor, most: tf.Tensor) -> dict[int, tf.Tensor]:
        """Gathers an int32 vector from each process, padded to a common size.

        TensorFlow requires every execution of a collective under one key to have the
        same size, so there is a key for each power of two.

        Args:
            bits: This process's vector.
            most: The size of the largest vector, the same in all processes.
        """
        arguments = self._next(0, DYNAMIC)
        with tf.device(self.device):
            powers = tf.constant([1 << k for k in range(DYNAMIC)])
            step = tf.reduce_sum(tf.cast(powers < most, tf.int32))
            padded = tf.pad(bits, [[0, powers[step] - tf.size(bits)]])
            arguments["instance_key"] += step
            return self._parts(tf.raw_ops.CollectiveGatherV2(input=padded, **arguments))

    def _parts(self, joined: tf.Tensor) -> dict[int, tf.Tensor]:
        """Splits a gathered tensor by process."""
        parts = tf.split(joined, len(self.processes))
        order = [process for process in self.order if process in self.processes]
        return dict(zip(order, parts, strict=True))

    def rows(self, x: tf.Tensor, axis: int, counts: Sequence[int | None]) -> tf.Tensor:
        """Concatenates the rows of all processes, in process order.

        Args:
            x: A matrix with this process's rows.
            axis: The axis that indexes the rows, 0 or 1.
            counts: How many rows each process has; None where that is unknown.
        """
        width = shapes.sizes(x)[1 - axis]
        static_shapes = [(c, width) if axis == 0 else (width, c) for c in counts]
        rows = exchanged(
            self,
            self.processes,
            [[Value(x.dtype.name, shape)] for shape in static_shapes],
            [(x,) if process == self.process else None for process in self.processes],
        )
        with tf.device(self.device):
            return tf.concat([part for (part,) in rows], axis)

    def reduce(self, x: tf.Tensor) -> tf.Tensor:
        """Sums over the processes, with bitwise equal results in all of them."""
        size = x.shape.num_elements() or 0
        with tf.device(self.device):
            return tf.raw_ops.CollectiveReduceV2(
                input=x,
                merge_op="Add",
                final_op="Id",
                max_subdivs_per_device=_PIECES,
                **self._next(size * x.dtype.size),
            )


@dataclasses.dataclass(frozen=True)
class Ways:
    """The channels from local replicas to those that other processes build.

    Attributes:
        elsewhere: The calls of all replicas.
        process: This process.
        order: As in `Crossing`.
        used: The first keys of all channels in use.
    """

    elsewhere: Elsewhere
    process: int
    order: tuple[int, ...]
    used: set[int] = dataclasses.field(default_factory=set)

    def of(self, call: Call) -> Crossing | None:
        """Returns the channel between a call's participants; None if all are local."""
        return self._way(call, call.group, 0)

    def of_region(
        self, call: Call, replica_ids: Sequence[int], depth: int
    ) -> Crossing | None:
        """Returns a channel for control flow, between the participants inside it.

        Args:
            call: The first call inside it.
            replica_ids: The participants.
            depth: How many other control flow ops enclose it.
        """
        return self._way(call, replica_ids, self.elsewhere.offset(call.key, depth))

    def _way(
        self, call: Call, replica_ids: Sequence[int], offset: int
    ) -> Crossing | None:
        processes = self.elsewhere.processes(replica_ids)
        if processes == (self.process,):
            return None
        key = self.elsewhere.first[call.key] + offset
        if key in self.used or processes not in self.elsewhere.groups:
            problem = (
                "is in a function or in control flow that runs twice in a step, or "
                "of which two gradients are taken"
                if key in self.used
                else "is in control flow in which groups of other hosts communicate"
            )
            raise errors.ReplicatorError(
                f"{call.primitive} on replica {call.replica_id} {problem}, which "
                "between-graph mode cannot lower.",
                [call.site()],
                "communicate outside of it; or run the program in-graph, which needs "
                "no --mode=between.",
            )
        self.used.add(key)
        device = hosts.cpu_of(self.elsewhere.world.devices[0])
        group = self.elsewhere.groups[processes]
        return Crossing(processes, self.process, device, group, self.order, key)


def ops_of(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the ops of a graph that run in all processes, or in none.

    These are collectives, and ops that may hold some.
    """
    return [
        op
        for op in graph.get_operations()
        if op.type.startswith("Collective")
        or (kind := kind_of(op)).calls
        and kind.stateful
    ]


def adds_up(calls: Sequence[Call]) -> bool:
    """Whether processes sum what calls pass, rather than gather it.

    Args:
        calls: The calls of all participants.
    """
    call = calls[0]
    if not call.facts.reduces_for_all or call.options["op"] not in ("sum", "mean"):
        return False
    return all(
        _is_known(value) and value.dtype in _ADDED
        for member in calls
        for value in member.operands[: len(member.operands) - call.conditional]
    )


def exchanged(
    crossing: Crossing,
    processes: Sequence[int],
    values: Sequence[Sequence[Value]],
    operands: Sequence[Sequence[tf.Tensor] | None],
) -> list[list[tf.Tensor]]:
    """Returns what every participant passes, as tensors of this process.

    Args:
        crossing: The channel to the other processes.
        processes: `processes[n]` is the process of the n-th participant.
        values: `values[n]` are dtype and shape of all that it passes.
        operands: The tensors that it passes; None if another process builds it.
    """
    static = all(_is_known(value) for passed in values for value in passed)
    local = [n for n, process in enumerate(processes) if process == crossing.process]
    with tf.device(crossing.device):
        pieces = [words.of(x) for n in local for x in operands[n] or ()]
        packed = tf.concat(pieces, 0) if pieces else tf.zeros([0], tf.int32)
        if static:
            sizes = _static_sizes(crossing, processes, values)
            shapes_of: Any = [
                [value.shape for value in participant] for participant in values
            ]
        else:
            sizes, shapes_of = _dynamic(crossing, processes, values, operands, packed)
        if not static:
            arrived = crossing.gather_any(packed, tf.reduce_max(list(sizes.values())))
        elif most := max(sizes.values()):
            padded = tf.pad(packed, [[0, most - sizes[crossing.process]]])
            arrived = crossing.gather(tf.ensure_shape(padded, [most]))
        else:
            arrived = dict.fromkeys(crossing.processes, packed)
        results: list[list[tf.Tensor]] = []
        offsets: dict[int, Any] = dict.fromkeys(crossing.processes, 0)
        for n, process in enumerate(processes):
            if operands[n] is not None:
                results.append(list(operands[n] or ()))
                continue
            tensors = []
            for value, shape in zip(values[n], shapes_of[n], strict=True):
                count = words.count(shape, value.dtype)
                part = tf.slice(arrived[process], [offsets[process]], [count])
                tensors.append(words.to_tensor(part, value, shape))
                offsets[process] += count
            results.append(tensors)
        return results


def check(call: Call) -> None:
    """Raises ReplicatorError if a call passes what cannot cross processes."""
    for value in call.operands:
        dtype = tf.as_dtype(value.dtype)
        if not dtype.size or dtype in (tf.resource, tf.variant, tf.string):
            problem, fix = f"{dtype.name} cannot cross hosts", "communicate numbers"
        elif value.shape is None:
            problem = "a tensor of unknown rank cannot cross hosts"
            fix = "set its rank, tensor.set_shape([None]) for a vector"
        else:
            continue
        raise errors.ReplicatorError(
            f"{problem} in between-graph mode.",
            [call.site()],
            f"{fix}; or run the program in-graph, which needs no --mode=between.",
        )


def _is_known(value: Value) -> bool:
    return value.shape is not None and None not in value.shape


def _static_sizes(
    crossing: Crossing, processes: Sequence[int], values: Sequence[Sequence[Value]]
) -> dict[int, int]:
    """Returns how many words each process passes."""
    sizes = dict.fromkeys(crossing.processes, 0)
    for process, passed in zip(processes, values, strict=True):
        sizes[process] += sum(words.count(value.shape, value.dtype) for value in passed)
    return sizes


def _dynamic(
    crossing: Crossing,
    processes: Sequence[int],
    values: Sequence[Sequence[Value]],
    operands: Sequence[Sequence[tf.Tensor] | None],
    packed: tf.Tensor,
) -> tuple[dict[int, tf.Tensor], list[list[tf.Tensor]]]:
    """Exchanges shapes first; returns each process's size in words, and all shapes."""
    ranks = [[len(value.shape or ()) for value in passed] for passed in values]
    lengths = dict.fromkeys(crossing.processes, 0)
    for process, passed_ranks in zip(processes, ranks, strict=True):
        lengths[process] += sum(passed_ranks)
    local_shapes = [
        tf.shape(x) for tensors in operands if tensors is not None for x in tensors
    ]
    sent = tf.concat([tf.zeros([0], tf.int32), *local_shapes], 0)
    most = max(lengths.values())
    sent = tf.ensure_shape(
        tf.pad(sent, [[0, most - lengths[crossing.process]]]), [most]
    )
    received = crossing.gather(sent)
    offsets = dict.fromkeys(crossing.processes, 0)
    sizes: dict[int, Any] = dict.fromkeys(crossing.processes, 0)
    all_shapes = []
    for process, passed_ranks, passed_values in zip(
        processes, ranks, values, strict=True
    ):
        passed_shapes = []
        for rank, value in zip(passed_ranks, passed_values, strict=True):
            shape = received[process][offsets[process] : offsets[process] + rank]
            offsets[process] += rank
            passed_shapes.append(shape)
            sizes[process] += words.count(shape, value.dtype)
        all_shapes.append(passed_shapes)
    sizes[crossing.process] = tf.size(packed)
    return sizes, all_shapes
