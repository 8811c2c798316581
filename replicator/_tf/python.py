# SPDX-License-Identifier: Apache-2.0
"""Python functions inside of a graph: tf.py_function and tf.numpy_function."""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops import script_ops as _script_ops


def mark_python_function(op: tf.Operation, replicas: int, line: str) -> None:
    """Marks the Python function that a py_function or numpy_function op calls.

    What the op names is in a registry that is not public. TensorFlow wraps what the
    user gave it, so the mark is on an object of this op's, and goes with it.

    Args:
        op: Calls it.
        replicas: How many replicas there are in the step.
        line: The user's line that makes the op.
    """
    function = _script_ops._py_funcs.get(op.get_attr("token").decode())
    if function is not None:
        function._replicator_call = replicas, line


def python_call() -> tuple[int, str]:
    """Returns how many replicas the step has by which the caller is called, and where.

    It is 0 where no step calls. By a marked function, see above: it runs in a thread of
    TensorFlow's, whose stack is all that tells what it belongs to.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _script_ops.FuncRegistry.__call__.__code__:
            return getattr(frame.f_locals.get("func"), "_replicator_call", (0, ""))
        frame = frame.f_back
    return 0, ""


class PythonFunction(NamedTuple):
    """A function that a tf.py_function or a tf.numpy_function has registered.

    Attributes:
        body: What the user passed, under AutoGraph's wrapper.
        facts: What else a copy of it is made of, where it runs eagerly.
    """

    body: Any
    facts: tuple[Any, ...]


def python_function(token: str) -> PythonFunction | None:
    """Returns the function of a token; no public call leads from op to function."""
    found = _script_ops._py_funcs.get(token)
    if not isinstance(found, _script_ops.EagerFunc):
        return None if found is None else PythonFunction(found, ())
    return PythonFunction(
        found._func,
        (
            tuple(found._out_dtypes),
            found._is_grad_func,
            found._support_graph_mode_gradient,
        ),
    )


def register_python_function(body: Any, like: PythonFunction) -> str:
    """Registers a function as another one is; returns its token.

    As TensorFlow does, for whom the outermost graph keeps it. Publicly that happens
    only together with a new op.
    """
    if like.facts:
        dtypes, is_gradient, differentiated = like.facts
        body = _script_ops.EagerFunc(body, list(dtypes), is_gradient)
        if differentiated:
            body.set_support_graph_mode_gradient()
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    if not hasattr(graph, "_py_funcs_used_in_graph"):
        graph._py_funcs_used_in_graph = []
    graph._py_funcs_used_in_graph.append(body)
    return _script_ops._py_funcs.insert(body)
