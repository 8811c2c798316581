# SPDX-License-Identifier: Apache-2.0
"""Puts effects in order across replicas: what barriers do.

Inside a replica `order/ordering.py` keeps effects in program order; across replicas
nothing orders them but a barrier. Each barrier's placeholder is made to wait for the
effects of its replica before it, and those behind it for the placeholder; once the
placeholders of all replicas are one op, all of these wait for all of those. Runs per
level of the graph, before circles are looked for, so that they are found through
barriers too.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import switching
from replicator.graph.ir.kinds import kind_of
from replicator.graph.lowering.crossing import Crossing
from replicator.graph.matching.match import Site


def put_up(
    ops: Sequence[tf.Operation],
    sites: Sequence[Site],
    initializers: Set[tf.Operation],
    flow: switching.Flow = switching.NONE,
) -> None:
    """Lets the barriers of one replica wait for effects, and effects for barriers.

    Control flow with a barrier inside is one, seen from outside.

    Args:
        ops: The ops of the replica on one level, in build order.
        sites: Those of them that communicate.
        initializers: Ops that initialise variables, which are no part of the step.
        flow: What is in control flow of TensorFlow 1.
    """
    barriers = {
        site.op
        for site in sites
        if any(call.facts.orders_effects for call in site.calls)
    }
    since: list[tf.Operation] = []  # the last barrier, and the effects behind it
    last: list[tf.Operation] = []
    for op in ops if barriers else ():
        if op in barriers:
            flow.let_wait(op, since)
            since, last = [op], [op]
        elif kind_of(op).effect and op not in initializers:
            flow.let_wait(op, last)
            since.append(op)


def join(barriers: Sequence[tf.Operation], way: Crossing | None = None) -> None:
    """Makes one op of the placeholders of a barrier, one per replica.

    Args:
        barriers: The placeholders.
        way: The way to the replicas that other processes build, if some take part.
    """
    before = [op for barrier in barriers for op in barrier.control_inputs]
    with tf.control_dependencies(None), tf.control_dependencies(before):
        if way is not None:
            before = [part.op for part in way.gather(tf.zeros([1], tf.int32)).values()]
        with tf.control_dependencies(before):
            joint = tf.no_op("fence")
    for barrier in barriers:
        _tf.move_control_outputs(barrier, joint)
