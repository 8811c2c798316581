# SPDX-License-Identifier: Apache-2.0
"""Graphs for several hosts, run on the CPUs of this process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf import text_format

import replicator
import replicator.plan
from replicator.costs import paper

# `layout[r]` is the host of replica r.
TWO_BY_TWO = (0, 0, 1, 1)
UNEVEN = (0, 0, 0, 1, 2, 2)
MIXED = (0, 1, 0, 1, 1)
ONE_EACH = (0, 1, 2)
LAYOUTS = (TWO_BY_TWO, UNEVEN, MIXED, ONE_EACH)


def names(layout: Sequence[int], kind: str = "CPU") -> list[str]:
    """Returns the devices of replicas on the hosts of a layout."""
    return [
        f"/job:worker/replica:0/task:{host}/device:{kind}:{layout[:r].count(host)}"
        for r, host in enumerate(layout)
    ]


def make(layout: Sequence[int], **options: Any) -> replicator.Replicator:
    """Returns a Replicator for hosts that do not exist, to build graphs with."""
    with paper.on_paper(1):
        return replicator.Replicator(names(layout), **options)


@dataclasses.dataclass(frozen=True)
class Ran:
    """The result of a step for several hosts.

    Attributes:
        values: The last step's result, as NumPy arrays.
        sent: How many tensors each host sent to each other one in a step, as TensorFlow
            partitioned the graph; without fetches.
        plan: The plan.
    """

    values: Any
    sent: Mapping[tuple[int, int], int]
    plan: replicator.plan.Plan

    @property
    def planned(self) -> Mapping[tuple[int, int], int]:
        """The plan's number of messages from each host to each other one."""
        count: Counter[tuple[int, int]] = Counter()
        for row in self.plan:
            for wire in row.wires:
                count[wire.source, wire.destination] += wire.messages
        return count


def run(
    layout: Sequence[int],
    make_step: Callable[[replicator.Replicator], Callable[[], Any]],
    steps: int = 1,
    **options: Any,
) -> Ran:
    """Builds a step for several hosts, and runs it on this process's CPUs.

    Args:
        layout: The host of each replica.
        make_step: Takes the Replicator, creates the variables and returns step_fn.
        steps: The number of steps.
        options: Options of the Replicator.
    """
    repl = make(layout, **options)
    with tf.Graph().as_default() as graph:
        with repl.context():
            step_fn = make_step(repl)
        fetches = repl.run(step_fn)
        setup = tf.compat.v1.global_variables_initializer()
        text = text_format.MessageToString(graph.as_graph_def())
    host_of = {}
    for r, (name, host) in enumerate(zip(names(layout), layout, strict=True)):
        local = f"/job:localhost/replica:0/task:0/device:CPU:{r}"
        text = text.replace(name, local)
        host_of[local] = host
    definition = text_format.Parse(text, tf.compat.v1.GraphDef())
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(definition, name="")
        flat = [graph.get_tensor_by_name(x.name) for x in tf.nest.flatten(fetches)]
        options_of_run = tf.compat.v1.RunOptions(output_partition_graphs=True)
        metadata = tf.compat.v1.RunMetadata()
        config = tf.compat.v1.ConfigProto(device_count={"CPU": len(layout), "GPU": 0})
        rewrites = config.graph_options.rewrite_options
        rewrites.constant_folding = rewrites.OFF  # it would change names
        with tf.compat.v1.Session(config=config) as session:
            session.run(graph.get_operation_by_name(setup.name))
            for _ in range(steps):
                values = session.run(flat, None, options_of_run, metadata)
    sent = Counter(ends for ends in _sends(metadata, host_of) if ends[0] != ends[1])
    return Ran(tf.nest.pack_sequence_as(fetches, values), sent, repl.plan)


def _sends(metadata: Any, host_of: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Yields the source and destination of each sent tensor, without mere fetches."""
    for graph in metadata.partition_graphs:
        readers: dict[str, set[str]] = {}
        for node in graph.node:
            for name in node.input:
                readers.setdefault(name.partition(":")[0], set()).add(node.op)
        for node in graph.node:
            if node.op in ("_Recv", "_HostRecv") and readers[node.name] != {"_Retval"}:
                ends = [node.attr[f"{e}_device"].s.decode() for e in ("send", "recv")]
                source, destination = (host_of[end] for end in ends)
                yield source, destination
