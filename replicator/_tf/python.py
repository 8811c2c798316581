# SPDX-License-Identifier: Apache-2.0
"""Python functions inside a graph: tf.py_function and tf.numpy_function."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops import script_ops as _script_ops

from replicator._tf import callers


def mark_python_function(op: tf.Operation, replicas: int, line: str) -> bool:
    """Marks the Python function that a py_function or numpy_function op calls.

    The registry that the op's token refers to is not public. TensorFlow wraps the
    user's function, so the mark is on an object that belongs to this op and dies with
    it.

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
    """Returns whose Python function is running: that of a step, another, or none.

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


class PythonFunction(NamedTuple):
    """A function that a tf.py_function or a tf.numpy_function has registered.

    Attributes:
        body: The user's function, under AutoGraph's wrapper.
        facts: The other arguments that a copy of it needs, if it runs eagerly.
    """

    body: Any
    facts: tuple[Any, ...]


def python_function(token: str) -> PythonFunction | None:
    """Returns the function of a token; no public call leads from op to function."""
    function = _script_ops._py_funcs.get(token)
    if not isinstance(function, _script_ops.EagerFunc):
        return None if function is None else PythonFunction(function, ())
    return PythonFunction(
        function._func,
        (
            tuple(function._out_dtypes),
            function._is_grad_func,
            function._support_graph_mode_gradient,
        ),
    )


def register_python_function(body: Any, like: PythonFunction) -> str:
    """Registers a function in the way of another one; returns its token.

    As in TensorFlow, the outermost graph keeps it alive. The public API only does this
    together with creating an op.
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
