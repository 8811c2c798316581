"""reduce_scatter: each replica receives its slice of the sum over all replicas.

Here only as the dual of all_gather: the sizes of the slices are those of the tensors
that were gathered. Dual: all_gather. Lowering: every device cuts its tensor up, and
each replica adds up its slices; a replica receives no more than it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replicator.graph.placeholder import Call, Placeholder, Value
from replicator.graph.rewrite import Matched
from replicator.primitives import all_gather, base


def sum_slices(
    tensors: Sequence[tf.Tensor], like: Sequence[tf.Tensor], axis: int | None, of: Call
) -> list[tf.Tensor]:
    """Sums tensors over the replicas and gives each one its slice.

    Args:
        tensors: Shaped as all_gather's results, [R, ...] or joined along `axis`.
        like: `like[k]` has the shape of this replica's slice of `tensors[k]`.
        axis: As it was given to all_gather.
        of: The call that is differentiated.

    Returns:
        One tensor per entry of `like`, of its shape.
    """
    sizes = [
        tf.constant(1) if axis is None else tf.shape(template)[axis]
        for template in like
    ]
    results = [Value.of(template) for template in like]
    agreed = [Value.of(t) for t in [*tensors, *sizes]]
    return base.communicate(
        "reduce_scatter",
        {"axis": axis},
        [*tensors, *sizes],
        results,
        gradient,
        agreed,
        of,
    )


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Gathers what the replicas received."""
    axis = placed.call.options["axis"]
    gathered = all_gather.gather_dense(upstream, axis, of=placed.call)
    return [*gathered, *[None] * len(upstream)]


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Cuts on the sender, adds on the receiver, in replica order.

    Moves (replicas - 1) / replicas * bytes(value) per replica.
    """
    axis = matched.options["axis"]
    count = len(matched.operands[0]) // 2
    replicas = range(len(matched.operands))
    results: list[list[tf.Tensor]] = [[] for _ in replicas]
    for k in range(count):
        sizes = tf.stack(matched.column(count + k))
        pieces = []
        for value, device in zip(matched.column(k), matched.devices, strict=True):
            with tf.device(device):
                pieces.append(
                    tf.unstack(value, num=len(replicas))
                    if axis is None
                    else tf.split(value, sizes, axis, num=len(replicas))
                )
        for r in replicas:
            with tf.device(matched.devices[r]):
                results[r].append(base.add_in_order([own[r] for own in pieces]))
    return results
