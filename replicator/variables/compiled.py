# SPDX-License-Identifier: Apache-2.0
"""Variables in functions with jit_compile=True, traced once for all replicas.

TensorFlow can trace a separate function for each replica, but not one that XLA
compiles. So a variable gives such a function not the handle of the built replica's
component but an argument, which each call fills in.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import control_flow, functions, state
from replicator.graph.order import effects
from replicator.variables import storage

_USED = "used in a function with jit_compile=True"


def function_around() -> Any | None:
    """Returns the graph of the jit-compiled function being traced for all replicas.

    Returns:
        None outside such functions, and in steps with only one replica.
    """
    replica = context.current()
    if replica is None or replica.num_replicas == 1 or tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return control_flow.compiled_function(graph, replica.build.graph)


def handle_by_call(function: Any, variable: Any, key: str) -> tf.Tensor:
    """Returns the handle of a ReplicatedVariable inside a compiled function.

    Args:
        function: The function's graph.
        variable: The variable.
        key: A key that is unique to the variable.

    Returns:
        An argument of the function: at each call, the calling replica's component.
    """

    def own_handle() -> tf.Tensor:
        if context.current() is None:
            _check_outside(function, variable, inside)
            return variable.components[0].handle
        # The function may have been traced in an earlier, failed build: note it again.
        _note_need(variable)
        return variable.handle

    like = variable.components[0].handle
    inside = functions.capture_by_call(function, key, like, own_handle)
    return inside


def note_use(variable: Any) -> None:
    """Notes that a jit-compiled function uses a variable, if one is being traced.

    XLA reaches only what is on the device that it compiles for: if one replica owns the
    variable, the others need components of their own.
    """
    if function_around() is not None:
        _note_need(variable)


def _note_need(variable: Any) -> None:
    if variable.placement.owner is not None:
        storage.need_components(variable, _USED)


def outside_handle(variable: Any) -> tf.Tensor | None:
    """Returns the handle of a variable in a jit-compiled function outside all steps.

    XLA compiles the function for the first device, so a component has to be there.

    Returns:
        None anywhere but in such a function.

    Raises:
        UnsupportedError: Another replica's device has the only component, and code that
            was built before relies on that.
    """
    if tf.executing_eagerly() or state.in_save_context():
        return None
    if control_flow.compiled_function(tf.compat.v1.get_default_graph(), None) is None:
        return None
    world = variable.world
    if variable.placement.device(world) != world.devices[0]:
        need = storage.Need(variable, _USED, errors.user_line())
        storage.mirror_all([need])
    return variable.components[0].handle


def check_write(variable: Any) -> None:
    """Raises if a jit-compiled function outside all steps writes several components.

    Keras compiles by XLA on GPUs unless told otherwise, also a loop outside of steps.

    Raises:
        UnsupportedError: XLA reaches only what is on the device it compiles for.
    """
    num_devices = len(variable.outside)
    if tf.executing_eagerly() or num_devices == 1:
        return
    if control_flow.compiled_function(tf.compat.v1.get_default_graph(), None) is None:
        return
    raise errors.UnsupportedError(
        f"variable {variable.name}, which is on {num_devices} devices, is written in a "
        "function with jit_compile=True outside any step. XLA reaches only the device "
        "that it compiles for.",
        fix="write it in a step; or pass jit_compile=False. On GPUs, Keras' "
        "model.compile and optimizers of tf_keras have True by default.",
    )


def _check_outside(function: Any, variable: Any, inside: tf.Tensor) -> None:
    """Raises if a function traced in a step would go wrong outside one.

    Outside, reading component 0 is right, unless the components are meant to differ;
    writing only component 0 is not.
    """
    writes = effects.find_writes(function.get_operations())
    if variable.placement.differs or any(resource is inside for _, resource in writes):
        raise errors.ContextError(
            "a function with jit_compile=True that was traced in a step uses variable "
            f"{variable.name} outside any step, where it would reach replica 0 only.",
            fix="create two functions, one to call in steps and one to call outside.",
        )


def refuse_to_tell(what: str) -> None:
    """Raises if a jit-compiled function asks which replica it is traced for.

    Args:
        what: What it asks for, e.g. "replica_id".

    Raises:
        ContextError: The function is compiled once, for all replicas.
    """
    if function_around() is not None:
        raise errors.ContextError(
            f"a function with jit_compile=True asks for {what}, but is traced once for "
            "all replicas.",
            fix=f"pass {what} as a tensor argument.",
        )
