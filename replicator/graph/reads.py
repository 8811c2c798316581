"""Reads each variable once between two writes, and not at all after an assignment.

Optimizers and layers read the same variable again and again (Keras reads the learning
rate once per variable that it updates), and the runtime does not join reads. For steps
of many small ops this is a good part of all ops. Runs after everything is built and
before effects are ordered; reads without consumers are pruned.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import tensorflow as tf

from replicator import _tf
from replicator.graph.kinds import resource_inputs


def join_reads(
    replicas: Sequence[Sequence[tf.Operation]], initializers: Set[tf.Operation]
) -> int:
    """Points the consumers of repeated reads at the first one, or at what was assigned.

    Args:
        replicas: `replicas[r]` are the ops of replica r's sub-graph, in build order.
        initializers: Ops among them that initialise variables, which are no part of the
            step: what they read and assign is not what the step does.

    Returns:
        The number of reads that have lost their consumers.
    """
    joined = 0
    for ops in replicas:
        values: dict[int, tf.Tensor] = {}  # by the id of the resource
        for op in ops:
            if op in initializers:
                continue
            if op.type != "ReadVariableOp":
                for _, tensor in resource_inputs(op):
                    if not _tf.only_reads(op):
                        values.pop(id(tensor), None)
                if op.type == "AssignVariableOp":
                    resource, value = op.inputs
                    values[id(resource)] = value
            elif not op.control_inputs:
                known = values.setdefault(id(op.inputs[0]), op.outputs[0])
                if known is not op.outputs[0]:
                    _tf.replace(op.outputs[0], known)
                    joined += 1
    return joined
