# SPDX-License-Identifier: Apache-2.0
"""Functions with jit_compile=True in a step, which are traced once for all replicas.

TensorFlow traces other functions for each replica if asked to, but not what XLA
compiles. A variable therefore gives such a function, in place of the handle of the
component that belongs to the replica being built, an argument that is filled in
wherever the function is called.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.graph.order import effects
from replicator.variables import storage

_USED = "used in a function with jit_compile=True"


def function_around() -> Any | None:
    """Returns the graph of the compiled function that is being traced for all replicas.

    Returns:
        None outside of such functions, and of steps with more than one replica.
    """
    replica = context.current()
    if replica is None or replica.num_replicas == 1 or tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return _tf.compiled_function(graph, replica.build.graph)


def handle_by_call(function: Any, variable: Any, key: str) -> tf.Tensor:
    """Returns the handle of a ReplicatedVariable inside a compiled function.

    Args:
        function: The function's graph.
        variable: The variable.
        key: Tells it from all others.

    Returns:
        An argument of the function: the replica's own component at each call.
    """

    def own_handle() -> tf.Tensor:
        if context.current() is None:
            _check_outside(function, variable, inside)
            return variable.components[0].handle
        # It may have been traced in a build that failed, when this was noted.
        _note_need(variable)
        return variable.handle

    like = variable.components[0].handle
    inside = _tf.capture_by_call(function, key, like, own_handle)
    return inside


def note_use(variable: Any) -> None:
    """Notes that a compiled function uses a variable, if that is what asks for it.

    XLA reaches only what is on the device that it compiles for: of a variable that one
    replica owns, the others need a component of their own.
    """
    if function_around() is not None:
        _note_need(variable)


def _note_need(variable: Any) -> None:
    if variable.placement.owner is not None:
        storage.need_components(variable, _USED)


def outside_handle(variable: Any) -> tf.Tensor | None:
    """Returns the handle of a variable in a compiled function outside of all steps.

    XLA compiles it for the first device, so that a component has to be there.

    Returns:
        None elsewhere than in such a function.

    Raises:
        UnsupportedError: Another replica's device has the only component, and code that
            was built before relies on that.
    """
    if tf.executing_eagerly() or _tf.in_save_context():
        return None
    if _tf.compiled_function(tf.compat.v1.get_default_graph(), None) is None:
        return None
    world = variable.world
    if variable.placement.device(world) != world.devices[0]:
        need = storage.Need(variable, _USED, errors.user_line())
        storage.mirror_all([need])
    return variable.components[0].handle


def _check_outside(function: Any, variable: Any, inside: tf.Tensor) -> None:
    """Raises if a function that was traced in a step would do harm outside of it.

    Reading component 0 is right there; writing it, and it alone, is not, and neither is
    reading it where the components are meant to differ.
    """
    writes = effects.find_writes(function.get_operations())
    if variable.placement.differs or any(resource is inside for _, resource in writes):
        raise errors.ContextError(
            errors.compose(
                f"a function with jit_compile=True that was traced in a step uses "
                f"variable {variable.name} outside of one, where it would reach "
                "replica 0 only.",
                [f"at {errors.user_line()}"],
                "make two functions, one to call in steps and one to call outside.",
            )
        )


def refuse_to_tell(what: str) -> None:
    """Raises if a compiled function asks which replica it is traced for.

    Args:
        what: What it asks for, e.g. "replica_id".

    Raises:
        ContextError: The answer would stay the same for all other replicas.
    """
    if function_around() is not None:
        raise errors.ContextError(
            errors.compose(
                f"a function with jit_compile=True asks for {what}, but is traced once "
                "for all replicas.",
                [f"at {errors.user_line()}"],
                f"pass {what} as an argument, a tensor.",
            )
        )
