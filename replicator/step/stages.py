# SPDX-License-Identifier: Apache-2.0
"""Records the graph of a step for `Replicator.stages` while the step is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import ops as tf_ops
from replicator.graph.ir.kinds import has_effect
from replicator.inputs import checks
from replicator.stages.writing import Recorder, Stages
from replicator.step.draft import Draft


def line_of(step_fn: Callable[..., Any]) -> str:
    """Returns the line that defines a step_fn, or its name where no line is known."""
    return errors.definition(step_fn) or checks.name_of(step_fn)


def ran(recorders: Iterable[Stages], step_fn: Callable[..., Any]) -> None:
    """Tells recorders that a step is run, which may have been built before."""
    for recorder in recorders:
        recorder.ran(line_of(step_fn))


def traced(graphs: Recorder, draft: Draft) -> None:
    """Records what step_fn has built for the first replica."""
    graphs.traced(draft.build.graph, draft.replicas[0])


def copied(graphs: Recorder, draft: Draft) -> None:
    """Records the ops of all replicas."""
    ops = [op for replica_ops in draft.replicas for op in replica_ops]
    graphs.copied(draft.build.graph, ops)


def finish(graphs: Recorder, draft: Draft) -> None:
    """Records the finished step: those of its ops that will run."""
    ops = [op for op in draft.ops() if not tf_ops.is_abandoned(op)]
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
    graphs.finish(draft.build.graph, running)
