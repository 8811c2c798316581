# SPDX-License-Identifier: Apache-2.0
"""What a session fetches: nests of tensors, ops, variables and names of these."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import sessions
from replicator.autodist.steps import Element

v1 = tf.compat.v1


def elements(
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


def _parts(given: Any) -> list[Any]:
    if isinstance(given, tf.SparseTensor):
        return [given.indices, given.values, given.dense_shape]
    if isinstance(given, tf.IndexedSlices):
        parts = [given.values, given.indices, given.dense_shape]
        return [part for part in parts if part is not None]
    if isinstance(given, tf.RaggedTensor):
        return [given.flat_values, *given.nested_row_splits]
    return [given]


def _element(graph: tf.Graph, leaf: Any) -> Any:
    """Returns the tensor or op of a graph that a fetch names."""
    try:
        return graph.as_graph_element(leaf, allow_tensor=True, allow_operation=True)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise errors.ArgumentError(
            f"session.run cannot fetch {errors.shown(leaf)}: {errors.told(error)}.",
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
            f"session.run cannot fetch {errors.shown(fetches)}: {errors.told(error)}.",
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
