# SPDX-License-Identifier: Apache-2.0
"""Python functions inside a graph: tf.py_function and tf.numpy_function."""

from __future__ import annotations

import copy
import types
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import script_ops as _script_ops

from replicator._tf import callers


def mark_python_function(op: tf.Operation, replicas: int, line: str) -> bool:
    """Marks the Python function that a py_function or numpy_function op calls.

    The registry that the op's token refers to is not public. TensorFlow wraps the
    user's function, so the mark is on an object that lives as long as this op.

    Args:
        op: The py_function or numpy_function op.
        replicas: The number of replicas of the step.
        line: The user's line that creates the op.

    Returns:
        Whether there is such a function: communication has an op of this type, too.
    """
    function = _script_ops._py_funcs.get(op.get_attr("token").decode())
    if function is not None:
        function._replicator_call = replicas, line
    return function is not None


def python_call() -> tuple[int, str] | None:
    """Returns which Python function is running: one of a step, another, or none.

    Inside `tf.py_function`, `tf.numpy_function` and the generator of a dataset,
    TensorFlow's runtime calls Python on a thread of its own, through the registry in
    script_ops.py; it passes on a token and arrays.

    Returns:
        The replica count and the user's line of the step that calls a function marked
        by `mark_python_function`; (0, "") for other functions; None if the running code
        was not called by TensorFlow's runtime.
    """
    for call in callers.calls(("__call__",), _script_ops.__name__):
        if "func" in call.values:
            return getattr(call.values["func"], "_replicator_call", (0, ""))
    return None


def copy_python_function(token: str, copies: dict[str, str]) -> str:
    """Registers the function of a tf.py_function once more; returns its new token.

    TensorFlow keeps what such a function computed under its token, until the gradient's
    own function, a closure of the token, asks for it. As in TensorFlow, the outermost
    graph keeps the function alive. The public API only registers one together with
    creating an op.

    Args:
        token: Its token.
        copies: The new tokens, by the old ones; is added to.
    """
    if token not in copies:
        copied = copy.copy(_script_ops._py_funcs.get(token))
        if copied._is_grad_func:
            copied._func = _with_tokens(copied._func, copies)
        graph = tf.compat.v1.get_default_graph()
        while getattr(graph, "outer_graph", None) is not None:
            graph = graph.outer_graph
        # A graph into which ops were copied, as a session's, may have none yet.
        if not hasattr(graph, "_py_funcs_used_in_graph"):
            graph._py_funcs_used_in_graph = []
        graph._py_funcs_used_in_graph.append(copied)
        copies[token] = _script_ops._py_funcs.insert(copied)
    return copies[token]


def _with_tokens(
    function: types.FunctionType, copies: dict[str, str]
) -> types.FunctionType:
    """Returns a copy of a function of TensorFlow's with new tokens in its closure."""

    def copied(content: Any) -> Any:
        if isinstance(content, types.FunctionType):
            return _with_tokens(content, copies)
        if isinstance(content, bytes):
            return copy_python_function(content.decode(), copies).encode()
        return content

    return types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(
            types.CellType(copied(c.cell_contents)) for c in function.__closure__ or ()
        ),
    )
