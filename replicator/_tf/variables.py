# SPDX-License-Identifier: Apache-2.0
"""Creates variables, and provides the parts of a variable with several components."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import lift_to_graph as _lift
from tensorflow.python.framework import ops as _ops
from tensorflow.python.ops import handle_data_util as _handles
from tensorflow.python.ops import resource_variable_ops as _rvo

# tf.Variable(...) would call the creator scopes again, ours included, and under a
# tf.distribute strategy their `next_creator` places variables itself.
ResourceVariable = _rvo.ResourceVariable

UnliftableError = _lift.UnliftableError


def last_variable_creator(creator: Any) -> contextlib.AbstractContextManager[None]:
    """Makes `creator` the last of all variable creators in this block.

    Creators entered by the public call run from the innermost to the outermost. One
    that creates variables itself would end the chain before the enclosing scopes have
    run. In a tf.function it has to run before TensorFlow's own creator, of priority 50.
    Inside the scope of a strategy, whose creator turns one variable into several, it
    runs in the usual order.
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
    """Returns the variable of this name on a server, which all of its clients share.

    tf.Variable gives each variable a unique name, and deletes it with the object.

    Args:
        name: Its name; the first client to ask creates it, without a value.
        dtype: The dtype of its value.
        shape: The shape of its value.
        device: The server's device.
        like: A variable whose name in messages and checkpoints it takes.
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
    """Has a resource variable's methods, which work on its handle, but not its type.

    The v1 Saver assigns to the single handle behind any instance of
    BaseResourceVariable, and asks all other objects how to save and restore them. A
    variable of several components needs to be asked, so it borrows the methods and not
    the class.
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
        """Copies shape, dtype, names and so on from `like`, a resource variable."""
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
    """Makes a variable use another resource variable's handle from now on."""
    variable._handle = first.handle
    if variable._in_graph_mode:
        variable._graph_element = first._graph_element
        variable._is_initialized_op = first._is_initialized_op


def lift_initial_value(value: tf.Tensor) -> tf.Tensor:
    """Evaluates a tensor of the function being traced outside of that function.

    Ops that stay in it, such as random numbers that nothing needs, do not run.

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
    """Returns the placeholders of a function's captured values, resources excepted."""
    return [
        inside
        for outside, inside in graph.captures
        if isinstance(outside, tf.__internal__.EagerTensor)
        and outside.dtype not in (tf.resource, tf.variant)
    ]


def unfilled(name: str | None, shape: Any, dtype: tf.DType) -> types.SimpleNamespace:
    """Creates the handle of a variable that never gets a value, with its other facts.

    The public API gives each variable a value on creation, and so memory. TensorFlow
    uses this handle to identify a variable whose values are elsewhere.

    Returns:
        A namespace for the `like` argument of `HandleVariable`.
    """
    graph_mode = not tf.executing_eagerly()
    with tf.name_scope(name or "Variable") as scope:
        unique_name = scope.removesuffix("/")
        handle = _rvo.eager_safe_variable_handle(
            types.SimpleNamespace(dtype=dtype),  # in place of an initial value
            tf.TensorShape(shape),
            unique_name if graph_mode else None,
            scope,  # with its slash, the op has this name and no other around it
            graph_mode,
        )
    return types.SimpleNamespace(
        shape=tf.TensorShape(shape),
        dtype=dtype,
        handle=handle,
        name=f"{unique_name}:0",
        _unique_id=unique_name if graph_mode else f"{unique_name}_{_ops.uid()}",
        _handle_name=unique_name,
        _graph_element=None,
        _initial_value=None,
        _is_initialized_op=None,
        _in_graph_mode=graph_mode,
        _validate_shape=True,
    )


def note_access(variable: Any) -> None:
    """Tells tapes and functions being traced that a variable is read.

    The public API does so only in methods that read through the variable's own handle.
    """
    _rvo.variable_accessed(variable)


def layer_state(layer: Any) -> list[bool]:
    """Returns whether a layer of Keras, and each of those in it, is trainable.

    It is called before each step; the public properties take ten times as long.
    """
    parts = vars(layer).get("_layers")
    if parts is None:
        parts = layers_in(layer)
    return [layer._trainable, *[part._trainable for part in parts]]


def layers_in(layer: Any) -> list[Any]:
    """Returns the layers that a layer of Keras consists of, but not those in them.

    Keras has no public name for it that models and other layers share.
    """
    return list(layer._flatten_layers(include_self=False, recursive=False))
