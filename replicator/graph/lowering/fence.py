# SPDX-License-Identifier: Apache-2.0
"""Implements barriers: orders effects across replicas.

Within a replica, `order/ordering.py` keeps effects in program order; across replicas
only barriers order them. A barrier's placeholder waits for its replica's earlier
effects, and later effects wait for the placeholder; once the placeholders of all
replicas are merged into one op, every later effect waits for every earlier one. Runs on
each graph level before the search for deadlocks, which thus sees cycles through
barriers.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import tensorflow as tf

from replicator._tf import ops as tf_ops
from replicator.graph.ir.kinds import kind_of
from replicator.graph.lowering.crossing import Crossing
from replicator.graph.matching.match import Site


def put_up(
    ops: Sequence[tf.Operation],
    sites: Sequence[Site],
    initializers: Set[tf.Operation],
) -> None:
    """Makes one replica's barriers wait for effects, and effects for barriers.

    Control flow with a barrier inside counts as a barrier.

    Args:
        ops: The replica's ops on one level, in build order.
        sites: Those of them that communicate.
        initializers: Ops that initialise variables and so are not part of the step.
    """
    barriers = {
        site.op
        for site in sites
        if any(call.facts.orders_effects for call in site.calls)
    }
    since: list[tf.Operation] = []  # the last barrier, and the effects after it
    last: list[tf.Operation] = []
    for op in ops if barriers else ():
        if op in barriers:
            tf_ops.add_control_inputs(op, since)
            since, last = [op], [op]
        elif kind_of(op).effect and op not in initializers:
            tf_ops.add_control_inputs(op, last)
            since.append(op)


def join(barriers: Sequence[tf.Operation], way: Crossing | None = None) -> None:
    """Merges a barrier's placeholders, one per replica, into one op.

    Args:
        barriers: The placeholders.
        way: The channel to replicas built by other processes, if any take part.
    """
    before = [op for barrier in barriers for op in barrier.control_inputs]
    with tf.control_dependencies(None), tf.control_dependencies(before):
        if way is not None:
            before = [part.op for part in way.gather(tf.zeros([1], tf.int32)).values()]
        with tf.control_dependencies(before):
            merged_op = tf.no_op("fence")
    for barrier in barriers:
        tf_ops.move_control_outputs(barrier, merged_op)
