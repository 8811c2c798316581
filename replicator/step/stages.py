# SPDX-License-Identifier: Apache-2.0
"""Records the graph of a step for `Replicator.stages` while the step is built."""

from __future__ import annotations

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir.kinds import has_effect
from replicator.stages.writing import Build
from replicator.step.draft import Draft


def traced(graphs: Build, draft: Draft) -> None:
    """Records what step_fn has built for the first replica."""
    graphs.traced(draft.build.graph, draft.replicas[0])


def copied(graphs: Build, draft: Draft) -> None:
    """Records the ops of all replicas."""
    ops = [op for replica_ops in draft.replicas for op in replica_ops]
    graphs.copied(draft.build.graph, ops)


def done(graphs: Build, draft: Draft) -> None:
    """Records the finished step: those of its ops that will run."""
    ops = [op for op in draft.ops() if not _tf.is_abandoned(op)]
    leaves = [leaf for leaf in draft.leaves() if leaf is not None]
    stack = [leaf.op if tf.is_tensor(leaf) else leaf for leaf in leaves]
    stack += [op for op in ops if has_effect(op) and op not in draft.initializers]
    step_ops = set(ops)
    running: set[tf.Operation] = set()
    while stack:
        op = stack.pop()
        if op in step_ops and op not in running:
            running.add(op)
            stack += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    graphs.done(draft.build.graph, running)
