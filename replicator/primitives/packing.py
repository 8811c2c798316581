# SPDX-License-Identifier: Apache-2.0
"""Concatenates the small tensors of a bucket into one, and splits it again.

Tensors are concatenated along their first axis, in the layout that they have. The ops
of all replicas and buckets are added in bulk, since there are many.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replicator._tf import choice
from replicator.graph.ir import shapes
from replicator.graph.lowering.matched import Matched
from replicator.primitives.levels import Received

Bucket = Sequence[int]  # the indices of its tensors among the operands


def pack(matched: Matched, buckets: Sequence[Bucket]) -> list[Sequence[tf.Tensor]]:
    """Concatenates the tensors of each bucket, on each replica.

    Args:
        matched: The communication.
        buckets: Each names operands of one dtype whose shapes differ only in the first
            size, or a single operand, which stays unchanged.

    Returns:
        `packs[b][n]` is the n-th participant's tensor for `buckets[b]`.
    """
    nodes = choice.Nodes()
    numbers: dict[tuple[int, int], int] = {}  # of nodes, by (bucket, participant)
    for n, (device, operands) in enumerate(
        zip(matched.devices, matched.operands, strict=True)
    ):
        axis = _constant(nodes, 0, device)
        for b, bucket in enumerate(buckets):
            if len(bucket) > 1:
                with tf.device(device):
                    rows = [_as_rows(operands[k]) for k in bucket]
                numbers[b, n] = nodes.add(
                    "ConcatV2",
                    [*rows, axis],
                    device,
                    N=len(rows),
                    T=rows[0].dtype,
                    Tidx=tf.int32,
                )
    ops = nodes.finish("pack") if numbers else []
    return [
        [ops[numbers[b, n]].outputs[0] for n in range(len(matched.devices))]
        if len(bucket) > 1
        else matched.column(bucket[0])
        for b, bucket in enumerate(buckets)
    ]


def unpack(
    matched: Matched, buckets: Sequence[Bucket], reduced: Sequence[Received]
) -> list[list[list[list[tf.Tensor]]]]:
    """Splits the reduced packs of each bucket.

    Args:
        matched: The communication.
        buckets: The buckets that were packed.
        reduced: `reduced[b][n]` holds the parts that the n-th participant received.

    Returns:
        `pieces[b][n][part]` is a list of tensors, one for each of `buckets[b]`.
    """
    nodes = choice.Nodes()
    axes = {device: _constant(nodes, 0, device) for device in matched.devices}
    numbers: dict[tuple[int, str], int] = {}  # of nodes, by (part's id, device)
    for bucket, received in zip(buckets, reduced, strict=True):
        if len(bucket) == 1:
            continue
        sizes = [_rows(matched.operands[0][k]) for k in bucket]
        devices = _readers(matched, bucket, received)
        for device, parts in zip(devices, received, strict=True):
            for part in parts:
                if (id(part), device) not in numbers:
                    numbers[id(part), device] = nodes.add(
                        "SplitV",
                        [part, _constant(nodes, sizes, device), axes[device]],
                        device,
                        num_split=len(sizes),
                        T=part.dtype,
                        Tlen=tf.int32,
                    )
    ops = nodes.finish("unpack") if numbers else []
    split = {key: ops[number].outputs for key, number in numbers.items()}

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
    """Returns the device that splits each participant's pack.

    If one replica owns the bucket and all received the same pack, only its device
    splits it; the others at most read the pieces, as a norm of all gradients does.
    """
    owner = matched.owner(bucket[0])
    if owner is None or len({tuple(map(id, parts)) for parts in received}) > 1:
        return matched.devices
    return [matched.devices[matched.group.index(owner)]] * len(matched.devices)


def _rows(tensor: tf.Tensor) -> int:
    return shapes.defined(tensor)[0] if tensor.shape.rank else 1


def _as_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Reshapes a scalar to one row; any other tensor can be concatenated as it is."""
    return tensor if tensor.shape.rank else tf.reshape(tensor, [1])


def _constant(nodes: choice.Nodes, value: int | list[int], device: str) -> int:
    """Adds an int32 constant to the nodes; returns its number."""
    proto = tf.make_tensor_proto(value, tf.int32)
    return nodes.add("Const", (), device, dtype=tf.int32, value=proto)
