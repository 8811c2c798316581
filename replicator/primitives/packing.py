# SPDX-License-Identifier: Apache-2.0
"""Joins the small tensors of a bucket into one, and takes it apart again.

Tensors are joined by their rows, as they are: nothing is laid out anew. The ops of all
replicas and buckets are added at once, since there are many.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import shapes
from replicator.graph.lowering.matched import Matched
from replicator.primitives.levels import Received

Bucket = Sequence[int]  # the places of its tensors among the operands


def pack(matched: Matched, buckets: Sequence[Bucket]) -> list[Sequence[tf.Tensor]]:
    """Makes one tensor of those of a bucket, on each replica.

    Args:
        matched: The communication.
        buckets: What is joined: tensors of one dtype, alike but for their first
            dimensions; or a single tensor, which stays as it is.

    Returns:
        `packs[b][n]` is what the n-th participant has of `buckets[b]`.
    """
    nodes = _tf.Nodes()
    made: dict[tuple[int, int], int] = {}  # by bucket and participant
    for n, (device, own) in enumerate(
        zip(matched.devices, matched.operands, strict=True)
    ):
        axis = _constant(nodes, 0, device)
        for b, bucket in enumerate(buckets):
            if len(bucket) > 1:
                with tf.device(device):
                    rows = [_as_rows(own[k]) for k in bucket]
                made[b, n] = nodes.add(
                    "ConcatV2",
                    [*rows, axis],
                    device,
                    N=len(rows),
                    T=rows[0].dtype,
                    Tidx=tf.int32,
                )
    ops = nodes.finish("pack") if made else []
    return [
        [ops[made[b, n]].outputs[0] for n in range(len(matched.devices))]
        if len(bucket) > 1
        else matched.column(bucket[0])
        for b, bucket in enumerate(buckets)
    ]


def unpack(
    matched: Matched, buckets: Sequence[Bucket], reduced: Sequence[Received]
) -> list[list[list[list[tf.Tensor]]]]:
    """Splits what the replicas received in place of the packs of each bucket.

    Args:
        matched: The communication.
        buckets: What was joined.
        reduced: `reduced[b][n]` are the parts that the n-th participant received.

    Returns:
        `pieces[b][n][part]` are tensors, one for each of `buckets[b]`.
    """
    nodes = _tf.Nodes()
    axes = {device: _constant(nodes, 0, device) for device in matched.devices}
    made: dict[tuple[int, str], int] = {}  # by what is split, and where
    for bucket, received in zip(buckets, reduced, strict=True):
        if len(bucket) == 1:
            continue
        sizes = [_rows(matched.operands[0][k]) for k in bucket]
        devices = _readers(matched, bucket, received)
        for device, parts in zip(devices, received, strict=True):
            for part in parts:
                if (id(part), device) not in made:
                    made[id(part), device] = nodes.add(
                        "SplitV",
                        [part, _constant(nodes, sizes, device), axes[device]],
                        device,
                        num_split=len(sizes),
                        T=part.dtype,
                        Tlen=tf.int32,
                    )
    ops = nodes.finish("unpack") if made else []
    split = {key: ops[number].outputs for key, number in made.items()}

    def pieces(part: tf.Tensor, bucket: Bucket, device: str) -> list[tf.Tensor]:
        if len(bucket) == 1:
            return [part]
        shapes = [matched.operands[0][k].shape for k in bucket]
        with tf.device(device):
            return [
                piece if shape.rank else tf.reshape(piece, [])
                for piece, shape in zip(split[id(part), device], shapes, strict=True)
            ]

    return [
        [
            [pieces(part, bucket, device) for part in parts]
            for device, parts in zip(
                _readers(matched, bucket, received), received, strict=True
            )
        ]
        for bucket, received in zip(buckets, reduced, strict=True)
    ]


def _readers(matched: Matched, bucket: Bucket, received: Received) -> Sequence[str]:
    """Returns where each participant's pack is split.

    If only one of them needs a pack, only that one splits it, where all received
    the same: the others read it at most, as a norm of all gradients does.
    """
    owner = matched.owner(bucket[0])
    if owner is None or len({tuple(map(id, parts)) for parts in received}) > 1:
        return matched.devices
    return [matched.devices[matched.group.index(owner)]] * len(matched.devices)


def _rows(tensor: tf.Tensor) -> int:
    return shapes.defined(tensor)[0] if tensor.shape.rank else 1


def _as_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Makes a scalar one row; any other tensor has rows that can be joined as it is."""
    return tensor if tensor.shape.rank else tf.reshape(tensor, [1])


def _constant(nodes: _tf.Nodes, value: int | list[int], device: str) -> int:
    """Notes an int32 constant."""
    proto = tf.make_tensor_proto(value, tf.int32)
    return nodes.add("Const", (), device, dtype=tf.int32, value=proto)
