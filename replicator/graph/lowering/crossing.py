# SPDX-License-Identifier: Apache-2.0
"""Communication between processes that each build their own graph.

What crosses are TensorFlow's collectives, one member per process: the processes find
one another by keys that derive from the plan, on which all have agreed before. By
`gather` each process receives what the others pass, exact to the bit, after which it
computes the results of its own replicas as if it had built all of them. Large sums go
by `reduce`, which moves less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.costs import hosts
from replicator.graph.ir import shapes
from replicator.graph.ir.placeholder import Call, Value
from replicator.graph.lowering import words
from replicator.graph.matching.elsewhere import DYNAMIC, Elsewhere

# Pieces in which TensorFlow reduces, of which one is computed while another travels:
# 64 MiB at 1 Gbit/s took 633 ms in four, 747 ms in one.
_PIECES = 4
# What TensorFlow adds up; 16-bit floats are added up as float32.
_ADDED = ("float16", "bfloat16", "float32", "float64", "int32", "int64")


@dataclasses.dataclass
class Crossing:
    """The way from one process to the others that take part in a communication.

    Attributes:
        processes: Those that take part, ascending.
        own: This one.
        device: Where this process sends and receives.
        group_key: Tells the group of processes from others.
        order: `order[k]` is the process whose part is the k-th of what is gathered, of
            all processes there are.
        key: The next of the numbers for collectives.
        sent: How many bytes this process passes to each other one, for plans.
        messages: In how many collectives.
        factors: Which operands are moved by their factors, and how many rows of these
            each process has.
    """

    processes: tuple[int, ...]
    own: int
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
        """Returns what each collective is told, and counts it.

        Args:
            nbytes: How much it sends.
            count: How many numbers it needs.
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
        """Returns an int32 vector of each process, all of one size, which is known."""
        told = self._next(bits.shape.num_elements() * words.BYTES)
        with tf.device(self.device):
            return self._parts(tf.raw_ops.CollectiveGatherV2(input=bits, **told))

    def gather_any(self, bits: tf.Tensor, most: tf.Tensor) -> dict[int, tf.Tensor]:
        """Returns an int32 vector of each process, padded to one size.

        TensorFlow wants one size in all executions of a collective of one number. So
        there are numbers for all powers of two.

        Args:
            bits: That of this process.
            most: The size of the largest, alike in all processes.
        """
        told = self._next(0, DYNAMIC)
        with tf.device(self.device):
            powers = tf.constant([1 << k for k in range(DYNAMIC)])
            step = tf.reduce_sum(tf.cast(powers < most, tf.int32))
            padded = tf.pad(bits, [[0, powers[step] - tf.size(bits)]])
            told["instance_key"] += step
            return self._parts(tf.raw_ops.CollectiveGatherV2(input=padded, **told))

    def _parts(self, joined: tf.Tensor) -> dict[int, tf.Tensor]:
        """Splits what was gathered."""
        parts = tf.split(joined, len(self.processes))
        order = [process for process in self.order if process in self.processes]
        return dict(zip(order, parts, strict=True))

    def rows(self, x: tf.Tensor, axis: int, counts: Sequence[int | None]) -> tf.Tensor:
        """Returns the rows of all processes, in their order.

        Args:
            x: A matrix, those of this one.
            axis: Along which the rows stand, 0 or 1.
            counts: How many rows each process has; None where that is unknown.
        """
        width = shapes.sizes(x)[1 - axis]
        known = [(c, width) if axis == 0 else (width, c) for c in counts]
        passed = exchanged(
            self,
            self.processes,
            [[Value(x.dtype.name, shape)] for shape in known],
            [(x,) if process == self.own else None for process in self.processes],
        )
        with tf.device(self.device):
            return tf.concat([part for (part,) in passed], axis)

    def reduce(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the sum over the processes, the same bits in all of them."""
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
    """The ways from the local replicas to those that other processes build.

    Attributes:
        elsewhere: The calls of all replicas.
        own: This process.
        order: As a Crossing's.
        used: The first numbers of all ways there are.
    """

    elsewhere: Elsewhere
    own: int
    order: tuple[int, ...]
    used: set[int] = dataclasses.field(default_factory=set)

    def of(self, call: Call) -> Crossing | None:
        """Returns the way between the participants of a call.

        None if this process builds all of them.
        """
        return self._way(call, call.group, 0)

    def of_region(
        self, call: Call, replica_ids: Sequence[int], depth: int
    ) -> Crossing | None:
        """Returns a way for control flow, to those who take part inside of it.

        Args:
            call: The first inside of it.
            replica_ids: The replicas.
            depth: In how many others the control flow is.
        """
        return self._way(call, replica_ids, self.elsewhere.offset(call.key, depth))

    def _way(
        self, call: Call, replica_ids: Sequence[int], offset: int
    ) -> Crossing | None:
        processes = self.elsewhere.processes(replica_ids)
        if processes == (self.own,):
            return None
        key = self.elsewhere.first[call.key] + offset
        if key in self.used or processes not in self.elsewhere.groups:
            what = (
                "is in a function that is called twice"
                if key in self.used
                else "is in control flow in which groups of other hosts communicate"
            )
            raise errors.ReplicatorError(
                errors.compose(
                    f"{call.primitive} on replica {call.replica_id} {what}, which "
                    "between-graph mode cannot lower.",
                    [call.site()],
                    "communicate outside of it; or run the program in-graph, which "
                    "needs no --mode=between.",
                )
            )
        self.used.add(key)
        device = hosts.cpu_of(self.elsewhere.world.devices[0])
        group = self.elsewhere.groups[processes]
        return Crossing(processes, self.own, device, group, self.order, key)


def ops_of(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the collectives of a graph: they run in all processes, or in none."""
    return [op for op in graph.get_operations() if op.type.startswith("Collective")]


def adds_up(calls: Sequence[Call]) -> bool:
    """Whether what calls pass is added up between processes, and nothing is gathered.

    Args:
        calls: Those of all participants.
    """
    call = calls[0]
    if not call.facts.reduces_for_all or call.options["op"] not in ("sum", "mean"):
        return False
    flag = 1 if call.options.get("when") else 0
    return all(
        _is_known(value) and value.dtype in _ADDED
        for one in calls
        for value in one.operands[: len(one.operands) - flag]
    )


def exchanged(
    crossing: Crossing,
    processes: Sequence[int],
    values: Sequence[Sequence[Value]],
    operands: Sequence[Sequence[tf.Tensor] | None],
) -> list[list[tf.Tensor]]:
    """Returns what every participant passes, in this process.

    Args:
        crossing: The way to the others.
        processes: `processes[n]` is the process of the n-th participant.
        values: `values[n]` are dtype and shape of all that it passes.
        operands: What it passes; None: it is built elsewhere.
    """
    known = all(_is_known(value) for own in values for value in own)
    own = [n for n, process in enumerate(processes) if process == crossing.own]
    with tf.device(crossing.device):
        pieces = [words.of(x) for n in own for x in operands[n] or ()]
        mine = tf.concat(pieces, 0) if pieces else tf.zeros([0], tf.int32)
        if known:
            sizes = _static_sizes(crossing, processes, values)
            told: Any = [[value.shape for value in one] for one in values]
        else:
            sizes, told = _dynamic(crossing, processes, values, operands, mine)
        if not known:
            arrived = crossing.gather_any(mine, tf.reduce_max(list(sizes.values())))
        elif most := max(sizes.values()):
            padded = tf.pad(mine, [[0, most - sizes[crossing.own]]])
            arrived = crossing.gather(tf.ensure_shape(padded, [most]))
        else:
            arrived = dict.fromkeys(crossing.processes, mine)
        passed: list[list[tf.Tensor]] = []
        taken: dict[int, Any] = dict.fromkeys(crossing.processes, 0)
        for n, process in enumerate(processes):
            if operands[n] is not None:
                passed.append(list(operands[n] or ()))
                continue
            made = []
            for value, shape in zip(values[n], told[n], strict=True):
                count = words.count(shape, value.dtype)
                part = tf.slice(arrived[process], [taken[process]], [count])
                made.append(words.to_tensor(part, value, shape))
                taken[process] += count
            passed.append(made)
        return passed


def check(call: Call) -> None:
    """Raises ReplicatorError if a call passes what cannot cross."""
    for value in call.operands:
        dtype = tf.as_dtype(value.dtype)
        if not dtype.size or dtype in (tf.resource, tf.variant, tf.string):
            problem, fix = f"{dtype.name} cannot cross hosts", "communicate numbers"
        elif value.shape is None:
            problem = "a tensor of unknown rank cannot cross hosts"
            fix = "say its rank, by tf.ensure_shape"
        else:
            continue
        raise errors.ReplicatorError(
            errors.compose(
                f"{problem} in between-graph mode.",
                [call.site()],
                f"{fix}; or run the program in-graph, which needs no --mode=between.",
            )
        )


def _is_known(value: Value) -> bool:
    return value.shape is not None and None not in value.shape


def _static_sizes(
    crossing: Crossing, processes: Sequence[int], values: Sequence[Sequence[Value]]
) -> dict[int, int]:
    """Returns how many words each process passes."""
    sizes = dict.fromkeys(crossing.processes, 0)
    for process, own in zip(processes, values, strict=True):
        sizes[process] += sum(words.count(value.shape, value.dtype) for value in own)
    return sizes


def _dynamic(
    crossing: Crossing,
    processes: Sequence[int],
    values: Sequence[Sequence[Value]],
    operands: Sequence[Sequence[tf.Tensor] | None],
    mine: tf.Tensor,
) -> tuple[dict[int, tf.Tensor], list[list[tf.Tensor]]]:
    """Tells one another the shapes first; returns the sizes, and all shapes."""
    ranks = [[len(value.shape or ()) for value in own] for own in values]
    lengths = dict.fromkeys(crossing.processes, 0)
    for process, own_ranks in zip(processes, ranks, strict=True):
        lengths[process] += sum(own_ranks)
    own = [tf.shape(x) for given in operands if given is not None for x in given]
    told = tf.concat([tf.zeros([0], tf.int32), *own], 0)
    most = max(lengths.values())
    told = tf.ensure_shape(tf.pad(told, [[0, most - lengths[crossing.own]]]), [most])
    heard = crossing.gather(told)
    taken = dict.fromkeys(crossing.processes, 0)
    sizes: dict[int, Any] = dict.fromkeys(crossing.processes, 0)
    found = []
    for process, own_ranks, own_values in zip(processes, ranks, values, strict=True):
        made = []
        for rank, value in zip(own_ranks, own_values, strict=True):
            shape = heard[process][taken[process] : taken[process] + rank]
            taken[process] += rank
            made.append(shape)
            sizes[process] += words.count(shape, value.dtype)
        found.append(made)
    sizes[crossing.own] = tf.size(mine)
    return sizes, found
