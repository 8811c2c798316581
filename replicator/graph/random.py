"""Every replica draws different random numbers.

Replicas build the same code, so an op with an explicit seed would draw the same numbers
on all of them (the same dropout mask, say). Stateful generators keep their seed in a
variable, which variables.py offsets; this file is about the seeds that are written into
the ops themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from replicator import _tf

_OFFSET = 1_000_003  # a prime, far from the small differences of hand-picked seeds


@contextlib.contextmanager
def graph_seed(graph: tf.Graph, replica_id: int) -> Iterator[None]:
    """In this block, a replica has a global seed of its own, if there is one at all.

    Nested functions take their seed from the graph, so this reaches them too.
    """
    before = graph.seed
    if before is not None:
        graph.seed = before + replica_id * _OFFSET
    try:
        yield
    finally:
        graph.seed = before


def separate_seeds(
    replicas: Sequence[Sequence[tf.Operation]], global_seed: int | None
) -> None:
    """Offsets the explicit seeds of ops, where no global seed has kept them apart.

    Args:
        replicas: `replicas[r]` are the ops of replica r.
        global_seed: The graph's; if set, `graph_seed` has done the work.
    """
    if global_seed is not None:
        return
    for replica_id, ops in enumerate(replicas):
        for op in ops if replica_id else ():
            if "seed2" in op.node_def.attr if _may_draw(op) else False:
                seed, seed2 = op.get_attr("seed"), op.get_attr("seed2")
                if seed or seed2:
                    _tf.set_int_attr(op, "seed2", seed2 + replica_id * _OFFSET)


def _may_draw(op: tf.Operation) -> bool:
    """A cheap test before the op's attributes are copied out of C++."""
    return "Random" in op.type or op.type in ("Multinomial", "TruncatedNormal")
