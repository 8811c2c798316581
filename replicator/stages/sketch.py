# SPDX-License-Identifier: Apache-2.0
"""Sketches of graphs: ops by device and name scope. Pure."""

from __future__ import annotations

import collections
import dataclasses
import re

import tensorflow as tf

from replicator.graph.ir import placeholder

_REPLICA = re.compile(r"replica_\d+/|AutoDist-Replica-\d+/")
_NUMBER = re.compile(r"_\d+$")  # which makes names in a graph unique
ANYWHERE = "no device"
COMMUNICATE = "communicate"  # the scope of the ops that replace placeholders


@dataclasses.dataclass(frozen=True)
class Block:
    """The ops of one scope on one device.

    Attributes:
        device: "CPU:0", with the task if there are several; or ANYWHERE.
        scope: The first part of their names, without the replica and numbers.
        ops: The number of ops.
        calls: The number of these that are placeholders of communication.
    """

    device: str
    scope: str
    ops: int
    calls: int = 0


@dataclasses.dataclass(frozen=True)
class Sketch:
    """The blocks of a graph, and the links between them.

    Attributes:
        blocks: The blocks, in the order of their first ops.
        links: (begin, end, count): `count` tensors go from block to block, by their
            numbers; only between devices.
    """

    blocks: tuple[Block, ...]
    links: tuple[tuple[int, int, int], ...]

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices, sorted."""
        return tuple(sorted({block.device for block in self.blocks}))


def of(graph: tf.compat.v1.GraphDef) -> Sketch:
    """Returns a sketch of the top level of a graph.

    Example:
        >>> from replicator.stages import sketch
        >>> with tf.Graph().as_default() as graph, tf.device("CPU:0"):
        ...     x = tf.constant(1.0, name="dense/x")
        ...     y = tf.identity(x, name="dense/y")
        >>> sketch.of(graph.as_graph_def()).blocks
        (Block(device='CPU:0', scope='dense', ops=2, calls=0),)

    Args:
        graph: The graph.
    """
    several = len({_task(node.device) for node in graph.node if node.device}) > 1
    place: dict[str, tuple[str, str]] = {}
    ops: collections.Counter[tuple[str, str]] = collections.Counter()
    calls: collections.Counter[tuple[str, str]] = collections.Counter()
    for node in graph.node:
        key = place[node.name] = _device(node.device, several), _scope(node.name)
        ops[key] += 1
        calls[key] += _is_call(node)
    numbers = {key: n for n, key in enumerate(ops)}
    links: collections.Counter[tuple[int, int]] = collections.Counter()
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            source = place.get(name.removeprefix("^").partition(":")[0])
            target = place[node.name]
            if (
                source
                and ANYWHERE not in (source[0], target[0])
                and source[0] != target[0]
            ):
                links[numbers[source], numbers[target]] += 1
    blocks = (Block(*key, count, calls[key]) for key, count in ops.items())
    return Sketch(tuple(blocks), tuple((a, b, n) for (a, b), n in links.items()))


def _is_call(node: tf.compat.v1.NodeDef) -> bool:
    if node.op != placeholder.TYPE:
        return False
    return placeholder.call_of(node.attr["token"].s) is not None


def _scope(name: str) -> str:
    first = _REPLICA.sub("", name, count=1).partition("/")[0]
    return _NUMBER.sub("", first)


def _task(device: str) -> str:
    return device.partition("/device:")[0]


def _device(name: str, several: bool) -> str:
    if not name:
        return ANYWHERE
    spec = tf.DeviceSpec.from_string(name)
    device = f"{spec.device_type}:{spec.device_index}" if spec.device_type else ANYWHERE
    return f"{spec.job}:{spec.task} {device}" if several and spec.job else device
