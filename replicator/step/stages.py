# SPDX-License-Identifier: Apache-2.0
"""What `Replicator.stages` writes down of a step while it is built."""

from __future__ import annotations

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir.kinds import has_effect
from replicator.stages.writing import Build
from replicator.step.draft import Draft


def traced(graphs: Build, draft: Draft) -> None:
    """Takes what step_fn has built for the first replica."""
    graphs.traced(draft.build.graph, draft.replicas[0])


def copied(graphs: Build, draft: Draft) -> None:
    """Takes what there is of all replicas."""
    ops = [op for own in draft.replicas for op in own]
    graphs.copied(draft.build.graph, ops)


def done(graphs: Build, draft: Draft) -> None:
    """Takes the step that is built: the ops of it which will run."""
    ops = [op for op in draft.ops() if not _tf.is_abandoned(op)]
    leaves = [leaf for leaf in draft.leaves() if leaf is not None]
    stack = [leaf.op if tf.is_tensor(leaf) else leaf for leaf in leaves]
    stack += [op for op in ops if has_effect(op) and op not in draft.initializers]
    known = set(ops)
    running: set[tf.Operation] = set()
    while stack:
        op = stack.pop()
        if op in known and op not in running:
            running.add(op)
            stack += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    graphs.done(draft.build.graph, running)
