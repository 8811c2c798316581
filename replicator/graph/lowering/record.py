# SPDX-License-Identifier: Apache-2.0
"""Records each communication as it is lowered, for `Replicator.plan`.

Facts only: where the communication is, who calls, and which bytes leave which replica's
device. Reads the ops that a lowering built and changes none, so that a plan shows what
was built, whatever the algorithm.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator.costs import cost, hosts, rates
from replicator.graph.ir.placeholder import Call

# TensorFlow wraps the name, once more for each gradient: "__inference_inner_42".
_FUNCTION_NAME = re.compile(r"__(?:inference|forward|backward)_(.+)_\d+$")


@dataclasses.dataclass(frozen=True)
class Nesting:
    """The control flow around a graph level.

    Attributes:
        path: The enclosing control flow, outermost first; empty at the top level.
        times: How often the level runs per step; None where that is only known when the
            step runs.
    """

    path: tuple[str, ...] = ()
    times: int | None = 1

    def inside(self, name: str, times: int | None = 1) -> Nesting:
        """Returns the nesting of a level inside this one.

        Args:
            name: The control flow, e.g. "loop body".
            times: How often the inner level runs each time this one does.
        """
        total = None if self.times is None or times is None else self.times * times
        return dataclasses.replace(self, path=(*self.path, name), times=total)


@dataclasses.dataclass(frozen=True)
class Link:
    """What one replica's device sends to another's in one communication.

    Example:
        >>> def step_fn():
        ...     return repl.broadcast(tf.zeros([10]), root=1)
        >>> repl.build(step_fn).plan[0].links
        (Link(source=1, destination=0, nbytes=40),)

    Attributes:
        source: The replica that sends.
        destination: The replica that receives.
        nbytes: The number of bytes; None where a size is only known when the step runs.
    """

    source: int
    destination: int
    nbytes: int | None


@dataclasses.dataclass(frozen=True)
class Wire:
    """What one host sends to another in one communication.

    Example:
        >>> repl = replicator.Replicator(cluster.devices)
        >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "mean")).plan
        >>> for wire in plan[0].wires:
        ...     print(plan.hosts[wire.source], wire.nbytes)
        /job:worker/replica:0/task:0 40
        /job:worker/replica:0/task:1 40

    Attributes:
        source: The sending host, as an index into the hosts of the replicas in order of
            first appearance.
        destination: The receiving host, likewise.
        messages: The number of tensors, each to one device.
        nbytes: The number of bytes; None where a size is only known when the step runs.
        seconds: How many seconds the link is busy, by the calibration; tensors of
            unknown size count as small.
    """

    source: int
    destination: int
    messages: int
    nbytes: int | None
    seconds: float


@dataclasses.dataclass(frozen=True)
class Communication:
    """One lowered communication.

    Attributes:
        calls: The call of each participant, in replica order.
        links: How much each replica's device sends to each other's.
        nesting: The control flow around it.
        algorithms: The algorithms used; empty for the primitive's only one.
        wires: What travels between hosts; empty on one host.
        seconds: How long it takes with nothing else running; None on one host.
    """

    calls: tuple[Call, ...]
    links: tuple[Link, ...]
    nesting: Nesting
    algorithms: tuple[str, ...] = ()
    wires: tuple[Wire, ...] = ()
    seconds: float | None = None


def function_name(op: tf.Operation) -> str:
    """Returns a display name for the function that an op calls: the user's own."""
    name = op.get_attr("f").name
    while match := _FUNCTION_NAME.match(name):
        name = match[1]
    return f"function {name}"


def links(
    replica_ids: Sequence[int],
    operands: Sequence[Sequence[tf.Tensor]],
    results: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
) -> tuple[Link, ...]:
    """Returns what travels between replicas in one communication.

    A tensor is sent once to each device on which something reads it. Checks without
    results are not counted.

    Args:
        replica_ids: The participants.
        operands: `operands[n]` is what participant n passes.
        results: `results[n]` is what participant n receives.
        devices: `devices[r]` is where replica r runs.
    """
    travels = _travels(replica_ids, operands, results, devices)
    return tuple(
        Link(source, reader, add(map(cost.known_bytes, tensors)))
        for (source, reader), tensors in sorted(travels.items())
    )


def wires(
    replica_ids: Sequence[int],
    operands: Sequence[Sequence[tf.Tensor]],
    results: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    calibration: rates.Calibration,
) -> tuple[Wire, ...]:
    """Returns what travels between hosts in one communication.

    Args:
        replica_ids: The participants.
        operands: `operands[n]` is what participant n passes.
        results: `results[n]` is what participant n receives.
        devices: `devices[r]` is where replica r runs.
        calibration: The cost of a message and of a byte.
    """
    members = hosts.by_host(devices)
    host = {r: number for number, ids in enumerate(members) for r in ids}
    crossing: dict[tuple[int, int], list[tf.Tensor]] = {}
    travels = _travels(replica_ids, operands, results, devices)
    for (source, reader), tensors in travels.items():
        if host[source] != host[reader]:
            crossing.setdefault((host[source], host[reader]), []).extend(tensors)
    host_wires = []
    for (source, reader), tensors in sorted(crossing.items()):
        ends = (hosts.host_of(devices[members[h][0]]) for h in (source, reader))
        rate = calibration.between(*ends)
        nbytes = sum(map(cost.tensor_bytes, tensors))
        seconds = len(tensors) * rate.message + nbytes * rate.link
        total = add(map(cost.known_bytes, tensors))
        host_wires.append(Wire(source, reader, len(tensors), total, seconds))
    return tuple(host_wires)


def _travels(
    replica_ids: Sequence[int],
    operands: Sequence[Sequence[tf.Tensor]],
    results: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
) -> dict[tuple[int, int], list[tf.Tensor]]:
    """Returns the tensors that travel, by (sending, receiving) replica."""
    owners: dict[Any, list[int]] = {}  # several for a tensor from outside the step
    for replica_id, tensors in zip(replica_ids, operands, strict=True):
        for tensor in tensors:
            owners.setdefault(tensor.ref(), []).append(replica_id)
    of_device: dict[str, int] = {device: r for r, device in enumerate(devices)}
    travels: dict[tuple[int, int], dict[Any, tf.Tensor]] = {}
    for tensor, reader in _reads(replica_ids, results, set(owners), of_device):
        sources = owners.get(tensor.ref(), [of_device.get(tensor.device)])
        if reader is not None and sources[0] is not None and reader not in sources:
            sent = travels.setdefault((sources[0], reader), {})
            sent[tensor.ref()] = tensor
    return {ends: list(sent.values()) for ends, sent in travels.items()}


def _reads(
    replica_ids: Sequence[int],
    results: Sequence[Sequence[tf.Tensor]],
    operands: Container[Any],
    of_device: Mapping[str, int],
) -> Iterator[tuple[tf.Tensor, int | None]]:
    """Yields (tensor, replica on whose device it is read), back to the operands."""
    waiting: list[tuple[tf.Tensor, int | None]] = [
        (tensor, replica_id)
        for replica_id, tensors in zip(replica_ids, results, strict=True)
        for tensor in tensors
    ]
    seen = set()
    while waiting:
        tensor, reader = waiting.pop()
        yield tensor, reader
        if tensor.ref() not in operands and tensor.op not in seen:
            seen.add(tensor.op)
            replica_here = of_device.get(tensor.op.device)
            waiting += [(x, replica_here) for x in tensor.op.inputs]


def add(sizes: Iterable[int | None]) -> int | None:
    """Adds up sizes; the sum is unknown if any of them is."""
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total
