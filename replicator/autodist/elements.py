# SPDX-License-Identifier: Apache-2.0
"""What a session fetches and is fed: elements of its graph, nests and names of these.

A feed is split along its first axis, if the fed tensor has one of unknown size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator._tf import sessions
from replicator.autodist.steps import Element
from replicator.forms import assembly
from replicator.graph.ir import shapes

v1 = tf.compat.v1
Pairs = list[tuple[tf.Tensor, np.ndarray]]
_NOT_FOUND = (TypeError, ValueError, KeyError, AttributeError)


def _parts(given: Any) -> list[Any]:
    """Returns what something that is fetched or fed consists of."""
    if isinstance(given, tf.SparseTensor):
        return [given.indices, given.values, given.dense_shape]
    if isinstance(given, tf.IndexedSlices):
        parts = [given.values, given.indices, given.dense_shape]
        return [part for part in parts if part is not None]
    if isinstance(given, tf.RaggedTensor):
        return [given.flat_values, *given.nested_row_splits]
    return [given]


# Fetches.


def leaves(fetches: Any) -> list[Any]:
    """Returns the leaves of a nest of fetches.

    Raises:
        ArgumentError: It is no nest.
    """
    found: list[Any] = []
    try:
        mapped(fetches, found.append)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.ArgumentError(
            f"session.run cannot fetch {errors.repr_of(fetches)}: "
            f"{errors.summary(error)}.",
            fix="fetch tensors, operations, or lists, tuples and dicts of them.",
        ) from error
    return found


def mapped(fetches: Any, function: Callable[[Any], Any]) -> Any:
    """Returns a nest of fetches with what a function returns in place of each leaf.

    Sessions take keys that cannot be sorted, as tf.nest wants them to be: those of a
    MonitoredSession are its hooks.
    """
    if isinstance(fetches, Mapping):
        found = {key: mapped(fetch, function) for key, fetch in fetches.items()}
        result: Any = copy.copy(fetches) if isinstance(fetches, MutableMapping) else {}
        result.update(found)
        return result
    if type(fetches) in (list, tuple):
        return type(fetches)([mapped(fetch, function) for fetch in fetches])
    if isinstance(fetches, tuple) and hasattr(fetches, "_fields"):
        return type(fetches)(*[mapped(fetch, function) for fetch in fetches])
    return tf.nest.map_structure(function, fetches)


def fetched(
    given: Any, graph: tf.Graph, variable_of: Callable[[tf.Operation], Any]
) -> list[Element]:
    """Returns the tensors, or the op, of a leaf of the user's fetches.

    In TensorFlow 1, the first output of a variable's op, named "w:0", is the value of a
    reference variable, but the handle of a resource variable.

    Args:
        given: The leaf.
        graph: The user's graph.
        variable_of: Returns the variable that an op makes the handle of, or None.

    Raises:
        ArgumentError: It is not in the graph, or is the handle of a resource variable.
    """
    found = []
    for part in _parts(given):
        element = _element(graph, part)
        if isinstance(element, tf.Tensor) and element.op.type == "VarHandleOp":
            variable = variable_of(element.op)
            if not getattr(variable, "is_by_reference", False):
                raise _is_handle(element)
            element = graph.as_graph_element(variable)
        found.append(element)
    return found


def _element(graph: tf.Graph, leaf: Any) -> Any:
    """Returns the tensor or op of a graph that a fetch names."""
    try:
        return graph.as_graph_element(leaf, allow_tensor=True, allow_operation=True)
    except _NOT_FOUND as error:
        raise errors.ArgumentError(
            f"session.run cannot fetch {errors.repr_of(leaf)}: "
            f"{errors.summary(error)}.",
            fix="fetch tensors, operations and variables of the scope's graph, their "
            "names, or a nest of these.",
        ) from error


def _is_handle(element: tf.Tensor) -> errors.ArgumentError:
    name = element.op.name
    return errors.ArgumentError(
        f"session.run cannot fetch {element.name}: it is the handle of variable "
        f"{name}, and not its value.",
        [
            f"created at {errors.line_of(element.op)}",
            f"fetched at {errors.user_line()}",
        ],
        "fetch the variable itself; or, by name, a tensor that holds its value, as "
        'tf.identity(variable, name="value") does.',
    )


def value(given: Any, values: Sequence[Any]) -> Any:
    """Returns what a leaf of the user's fetches gives, of the values of its parts."""
    if isinstance(given, tf.SparseTensor):
        return v1.SparseTensorValue(*values)
    if isinstance(given, tf.IndexedSlices):
        return sessions.IndexedSlicesValue(*values, *[None] * (3 - len(values)))
    if isinstance(given, tf.RaggedTensor):
        result, *splits = values
        for one in reversed(splits):
            result = v1.ragged.RaggedTensorValue(result, one)
        return result
    return None if isinstance(values[0], tf.Operation) else values[0]


# Feeds.


def fed(graph: tf.Graph, given: Any) -> Pairs:
    """Returns pairs of the fed tensors and their values, in the order of names.

    Args:
        graph: The user's graph.
        given: The user's feed_dict, or None.

    Raises:
        ArgumentError: A key is no tensor of the graph, or a value does not fit it.
    """
    if given is not None and not isinstance(given, Mapping):
        raise errors.ArgumentError(
            f"session.run was given feed_dict={errors.repr_of(given)}.",
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
        if not isinstance(key, tf.SparseTensor | tf.IndexedSlices):
            yield key, value
            continue
        parts = _parts(key)
        is_tuple = isinstance(value, tuple)
        values = [one for one in value if one is not None] if is_tuple else []
        if not 2 <= len(values) <= len(parts):
            raise errors.ArgumentError(
                f"session.run was fed {errors.repr_of(value)} for a "
                f"{type(key).__name__}.",
                [f"fed at {errors.user_line()}"],
                "feed its components, as session.run returns them.",
            )
        yield from zip(parts, values, strict=False)


def _tensor(graph: tf.Graph, key: Any) -> tf.Tensor:
    try:
        element = graph.as_graph_element(key, allow_tensor=True, allow_operation=False)
    except _NOT_FOUND as error:
        raise errors.ArgumentError(
            f"session.run was fed {errors.repr_of(key)}, which is not a tensor of its "
            f"graph: {errors.summary(error)}.",
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
        raise _unfit(tensor, value, errors.summary(error)) from error
    if isinstance(value, int) and array.dtype.kind in "iu" and int(array) != value:
        raise _unfit(tensor, value, "the number does not fit")
    if not tensor.shape.is_compatible_with(array.shape):
        raise _unfit(tensor, value, f"the value is of shape {array.shape}")
    return array


def _unfit(tensor: tf.Tensor, value: Any, why: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"{tensor.name}, {tensor.dtype.name}{tensor.shape}, was fed "
        f"{errors.repr_of(value)}: {why}.",
        [f"created at {errors.line_of(tensor.op)}", f"fed at {errors.user_line()}"],
        "feed a value of the placeholder's dtype and shape.",
    )
