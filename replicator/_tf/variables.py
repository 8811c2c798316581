# SPDX-License-Identifier: Apache-2.0
"""Creating variables, and what a variable of several components is made of."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import lift_to_graph as _lift
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import handle_data_util as _handles
from tensorflow.python.ops import resource_variable_ops as _rvo

# tf.Variable(...) asks the creator scopes again, ours too. The `next_creator` that it
# is given places variables itself, in the scope of a tf.distribute strategy.
ResourceVariable = _rvo.ResourceVariable

UnliftableError = _lift.UnliftableError


def last_variable_creator(creator: Any) -> contextlib.AbstractContextManager[None]:
    """Has `creator` make variables in this block, behind all other creators.

    Creators that are entered by the public call are asked from the innermost to the
    outermost. One that makes variables by itself would end the chain before the scopes
    around it are asked. In a tf.function it has to come before TensorFlow's own
    creator, of priority 50. Inside the scope of a strategy, whose creator makes several
    variables of one, it is asked in the usual order.
    """
    priority = 100 if tf.distribute.has_strategy() else 75
    graph = tf.compat.v1.get_default_graph()
    return graph._variable_creator_scope(creator, priority=priority)


def shared_variable(
    name: str,
    dtype: tf.DType,
    shape: Any,
    device: str,
    like: tf.Variable | None = None,
) -> tf.Variable:
    """Returns the variable of a name on a server, which all of its clients share.

    tf.Variable gives each variable a name of its own, and deletes it with the object.

    Args:
        name: The name; who asks for it first creates it, without a value.
        dtype: Of its values.
        shape: Of its values.
        device: Of the server.
        like: A variable whose name in messages and checkpoints it takes over.
    """
    with tf.device(device):
        handle = tf.raw_ops.VarHandleOp(
            container="", shared_name=name, dtype=dtype, shape=shape
        )
    handle._handle_data = _handles.create_handle_data(tf.TensorShape(shape), dtype)
    shared = ResourceVariable(handle=handle, dtype=dtype, shape=shape, trainable=False)
    shared._handle_name = f"{name}:0" if like is None else like._handle_name
    shared._unique_id = name if like is None else like._unique_id
    shared._in_graph_mode = False
    return shared


def is_initialized(variable: tf.Variable) -> bool:
    """Whether a variable has a value."""
    op = tf.raw_ops.VarIsInitializedOp(resource=variable.handle)
    return bool(op)


class HandleVariable(tf.Variable, tf.__internal__.types.Tensor):
    """All that a resource variable can do by its handle, without its type.

    The v1 Saver assigns the single handle behind whatever *is a* BaseResourceVariable,
    and asks everything else how it wants to be saved and restored. A variable of
    several components needs to be asked, so it borrows the methods and not the class.
    """

    _should_act_as_resource_variable = True
    locals().update(
        {
            name: member
            for name, member in vars(_rvo.BaseResourceVariable).items()
            if name
            not in ("__init__", "__dict__", "__weakref__", "__doc__", "__module__")
            and not name.startswith("_abc")
        }
    )

    def __init__(self, like: Any, **facts: Any) -> None:
        """Takes over shape, dtype, names and so on from `like`, a resource variable."""
        with tf.init_scope():
            _rvo.BaseResourceVariable.__init__(
                self,
                shape=like.shape,
                dtype=like.dtype,
                handle=like.handle,
                name=like.name,
                unique_id=like._unique_id,
                handle_name=like._handle_name.removesuffix(":0"),
                graph_element=like._graph_element,
                initial_value=like._initial_value,
                is_initialized_op=like._is_initialized_op,
                save_slice_info=None,
                in_graph_mode=like._in_graph_mode,
                validate_shape=like._validate_shape,
                **facts,
            )
            self._maybe_initialize_trackable()


def stand_for(variable: HandleVariable, first: Any) -> None:
    """Lets a variable have the handle of another resource variable from now on."""
    variable._handle = first.handle
    if variable._in_graph_mode:
        variable._graph_element = first._graph_element
        variable._is_initialized_op = first._is_initialized_op


def lift_initial_value(value: tf.Tensor) -> tf.Tensor:
    """Evaluates a tensor of the function being traced outside of it.

    What is left of it inside, random numbers that nothing needs, does not run.

    Raises:
        UnliftableError: The tensor depends on the function's arguments or state.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            lifted = tf.compat.v1.wrap_function(lambda: None, [])
            graph = lifted.graph
            with graph.as_default():
                copy = _lift.lift_to_graph(
                    [value],
                    graph,
                    sources=_known_outside(value.graph),
                    handle_captures=True,
                )[value]
            return lifted.prune([], copy)()
        graph = tf.compat.v1.get_default_graph()
        return _lift.lift_to_graph([value], graph)[value]


def _known_outside(graph: Any) -> list[tf.Tensor]:
    """Returns the tensors by which a function captures values, and no state."""
    return [
        inside
        for outside, inside in graph.captures
        if isinstance(outside, tf.__internal__.EagerTensor)
        and outside.dtype not in (tf.resource, tf.variant)
    ]


def unfilled(name: str | None, shape: Any, dtype: tf.DType) -> types.SimpleNamespace:
    """Makes the handle of a variable that never has a value, and what goes with it.

    The public API gives each variable a value when it is created, and so memory. By
    this handle TensorFlow knows a variable whose values are elsewhere.

    Returns:
        What `HandleVariable` takes over.
    """
    graph_mode = not tf.executing_eagerly()
    with tf.name_scope(name or "Variable") as scope:
        own = scope.removesuffix("/")
        handle = _rvo.eager_safe_variable_handle(
            types.SimpleNamespace(dtype=dtype),  # in place of an initial value
            tf.TensorShape(shape),
            own if graph_mode else None,
            own,
            graph_mode,
        )
    return types.SimpleNamespace(
        shape=tf.TensorShape(shape),
        dtype=dtype,
        handle=handle,
        name=f"{own}:0",
        _unique_id=own if graph_mode else f"{own}_{_ops.uid()}",
        _handle_name=own,
        _graph_element=None,
        _initial_value=None,
        _is_initialized_op=None,
        _in_graph_mode=graph_mode,
        _validate_shape=True,
    )


def note_access(variable: Any) -> None:
    """Tells tapes, and functions that are traced, that a variable is read.

    The public API does so in the methods that read by the variable's own handle.
    """
    _rvo.variable_accessed(variable)
