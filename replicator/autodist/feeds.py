# SPDX-License-Identifier: Apache-2.0
"""What a session is fed, and what of it is split.

A feed is split along its first axis, if the fed tensor has one of unknown size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator.forms import assembly
from replicator.graph.ir import shapes

Pairs = list[tuple[tf.Tensor, np.ndarray]]


def read(graph: tf.Graph, given: Any) -> Pairs:
    """Returns pairs of the fed tensors and their values, in the order of names.

    Args:
        graph: The user's graph.
        given: The user's feed_dict, or None.

    Raises:
        ArgumentError: A key is no tensor of the graph, or a value does not fit it.
    """
    if given is not None and not isinstance(given, Mapping):
        raise errors.ArgumentError(
            f"session.run was given feed_dict={errors.shown(given)}.",
            fix="pass a dict that maps tensors to their values.",
        )
    pairs = [(_tensor(graph, key), value) for key, value in _flat(given or {})]
    pairs.sort(key=lambda pair: pair[0].name)
    return [(tensor, _array(tensor, value)) for tensor, value in pairs]


def pattern(fed: Pairs, num_replicas: int) -> assembly.Pattern:
    """Returns which fed values are split; see `assembly.pattern`."""
    rows = [
        len(array) if tensor.shape.rank and shapes.size(tensor, 0) is None else None
        for tensor, array in fed
    ]
    return assembly.pattern(tuple(rows), num_replicas)


def _flat(fed: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields pairs of tensors and values, of which sparse ones have several."""
    for key, value in fed.items():
        if isinstance(key, tf.SparseTensor):
            keys = [key.indices, key.values, key.dense_shape]
        elif isinstance(key, tf.IndexedSlices):
            keys = [key.values, key.indices, key.dense_shape][: len(value)]
        else:
            yield key, value
            continue
        if not isinstance(value, tuple) or len(value) != len(keys):
            raise errors.ArgumentError(
                f"session.run was fed {errors.shown(value)} for a "
                f"{type(key).__name__}.",
                [f"fed at {errors.user_line()}"],
                "feed its components, as session.run returns them.",
            )
        yield from zip(keys, value, strict=True)


def _tensor(graph: tf.Graph, key: Any) -> tf.Tensor:
    try:
        element = graph.as_graph_element(key, allow_tensor=True, allow_operation=False)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise errors.ArgumentError(
            f"session.run was fed {errors.shown(key)}, which is not a tensor of its "
            f"graph: {errors.told(error)}.",
            fix="feed placeholders and tensors of the scope's graph.",
        ) from error
    assert isinstance(element, tf.Tensor), "operations are not allowed"
    return element


def _array(tensor: tf.Tensor, value: Any) -> np.ndarray:
    """Returns a value as an array of a tensor's dtype and shape."""
    if isinstance(value, tf.Tensor) and tf.is_symbolic_tensor(value):
        raise _unfit(tensor, value, "it is a symbolic tensor, which has no value")
    dtype = tensor.dtype.as_numpy_dtype
    try:
        array = np.asarray(value, dtype=dtype)
    except (
        *(TypeError, ValueError, OverflowError, NotImplementedError),
        tf.errors.OpError,
    ) as error:
        raise _unfit(tensor, value, errors.told(error)) from error
    if isinstance(value, int) and array.dtype.kind in "iu" and int(array) != value:
        raise _unfit(tensor, value, "the number does not fit")
    if not tensor.shape.is_compatible_with(array.shape):
        raise _unfit(tensor, value, f"the value is of shape {array.shape}")
    return array


def _unfit(tensor: tf.Tensor, value: Any, why: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"{tensor.name}, {tensor.dtype.name}{tensor.shape}, was fed "
        f"{errors.shown(value)}: {why}.",
        [f"created at {errors.line_of(tensor.op)}", f"fed at {errors.user_line()}"],
        "feed a value of the placeholder's dtype and shape.",
    )
