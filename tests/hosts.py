"""Several hosts without several: graphs for them, run on the CPUs of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator.costs import paper

# `layout[r]` is the host of replica r.
TWO_BY_TWO = (0, 0, 1, 1)
UNEVEN = (0, 0, 0, 1, 2, 2)
MIXED = (0, 1, 0, 1, 1)
ONE_EACH = (0, 1, 2)
LAYOUTS = (TWO_BY_TWO, UNEVEN, MIXED, ONE_EACH)


def names(layout: Sequence[int], kind: str = "CPU") -> list[str]:
    """Returns the devices of replicas that are on hosts as the layout says."""
    return [
        f"/job:worker/replica:0/task:{host}/device:{kind}:{layout[:r].count(host)}"
        for r, host in enumerate(layout)
    ]


def make(layout: Sequence[int], **options: Any) -> replicator.Replicator:
    """Returns a Replicator for hosts that do not exist, to be built into graphs."""
    with paper.on_paper(1):
        return replicator.Replicator(names(layout), **options)


def run(
    layout: Sequence[int],
    make_step: Callable[[replicator.Replicator], Callable[[], Any]],
    steps: int = 1,
    **options: Any,
) -> tuple[Any, list[tuple[str, str, str]], replicator.plan.Plan]:
    """Builds a step for several hosts, and runs it with this process' CPUs for theirs.

    Args:
        layout: On which host each replica is.
        make_step: Given the Replicator, creates the variables and returns step_fn.
        steps: How often to run.
        options: Of the Replicator.

    Returns:
        What the last step returned, as NumPy arrays; what TensorFlow sent between hosts
        in a step, as (source, destination, tensor); and the plan.
    """
    repl = make(layout, **options)
    with tf.Graph().as_default() as graph:
        with repl.context():
            step_fn = make_step(repl)
        fetches = repl.run(step_fn)
        setup = tf.compat.v1.global_variables_initializer()
        text = str(graph.as_graph_def())
    local = {}
    for r, name in enumerate(names(layout)):
        local[name] = f"/job:localhost/replica:0/task:0/device:CPU:{r}"
        text = text.replace(name, local[name])
    definition = tf.compat.v1.GraphDef()
    google_parse(text, definition)
    flat = tf.nest.flatten(fetches)
    host_of = {local[name]: host for name, host in zip(names(layout), layout)}
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(definition, name="")
        wanted = [graph.get_tensor_by_name(t.name) for t in flat]
        run_options = tf.compat.v1.RunOptions(output_partition_graphs=True)
        metadata = tf.compat.v1.RunMetadata()
        with tf.compat.v1.Session() as session:
            session.run(graph.get_operation_by_name(setup.name))
            for _ in range(steps):
                values = session.run(wanted, None, run_options, metadata)
    sent = []
    for node in [n for part in metadata.partition_graphs for n in part.node]:
        if node.op in ("_Send", "_HostSend"):
            ends = [node.attr[f"{end}_device"].s.decode() for end in ("send", "recv")]
            source, destination = (host_of.get(end) for end in ends)
            if source != destination:
                name = node.attr["tensor_name"].s.decode()
                sent.append((source, destination, node.input[0].split(":")[0], name))
    values = [np.asarray(value) for value in values]
    return tf.nest.pack_sequence_as(fetches, values), sent, repl.plan


def google_parse(text: str, definition: Any) -> None:
    """Reads a message of protocol buffers from its text."""
    from google.protobuf import text_format

    text_format.Parse(text, definition)
