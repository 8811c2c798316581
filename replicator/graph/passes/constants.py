"""Large constants, of which a step holds one for all replicas.

Each replica puts a copy of a NumPy array that step_fn uses into the graph; TensorFlow
copies it again into the definition of the function, and when it runs that. Once step_fn
has been called for the last time, large constants of equal bits give way to one tensor,
which the function captures and which is in no definition. Constants inside branches,
loops and nested functions stay as they are; so do those of a tf.function or tf.Graph of
the user's, who may still use what step_fn left behind there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import numpy as np
import tensorflow as tf

from replicator import _tf

LARGE = 128 * 1024  # bytes; TensorFlow folds none that are larger than 100 KiB


def share(
    graph: tf.Graph, ops: Iterable[tf.Operation], device: str, spared: Container[int]
) -> None:
    """Lets what uses large constants use one of all replicas, and empties them.

    Args:
        graph: That of a step which is traced by itself.
        ops: Those of all replicas, which share the memory of CPUs.
        device: Where the tensors are.
        spared: The ids of tensors to leave alone.
    """
    known: list[tuple[np.ndarray, tf.Tensor]] = []
    for op in ops:
        if op.type != "Const" or not _is_large(op.outputs[0]):
            continue
        constant = op.outputs[0]
        if id(constant) in spared:
            continue
        if constant.consumers():  # some are made to ask for their rank only
            value = tf.make_ndarray(op.get_attr("value"))
            _tf.replace(constant, _one_of(value, known, graph, device))
        _tf.empty_constant(op)


def _one_of(
    value: np.ndarray,
    known: list[tuple[np.ndarray, tf.Tensor]],
    graph: tf.Graph,
    device: str,
) -> tf.Tensor:
    """Returns the tensor of a value, captured; adds it to those that are known."""
    for other, tensor in known:
        if other.dtype == value.dtype and other.shape == value.shape:
            # As bytes: NaNs are equal then, and zeros of two signs are not.
            if np.array_equal(_bytes(other), _bytes(value)):
                return tensor
    with tf.init_scope(), tf.device(device):
        outside = tf.constant(value)
    tensor = graph.capture(outside)
    known.append((value, tensor))
    return tensor


def _bytes(value: np.ndarray) -> np.ndarray:
    return np.ravel(value).view(np.uint8)


def _is_large(tensor: tf.Tensor) -> bool:
    count = tensor.shape.num_elements() or 0
    return count * tensor.dtype.size >= LARGE and tensor.dtype.is_numpy_compatible
