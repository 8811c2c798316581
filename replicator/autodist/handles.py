# SPDX-License-Identifier: Apache-2.0
"""Fetches of variables' handles, of which the graph of all replicas has others.

In TensorFlow 1, the first output of a variable's op, named "w:0", is the value of a
reference variable, but the handle of a resource variable.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.autodist.program import Program


def is_made_by(what: Any) -> bool:
    """Whether what is fetched is an op that makes a variable's handle."""
    return isinstance(what, tf.Operation) and what.type == "VarHandleOp"


def seen(program: Program, element: Any) -> Any:
    """Returns what a fetch gives: the value in place of a reference variable's handle.

    Args:
        program: The single-device graph.
        element: A tensor or op of it.

    Raises:
        ArgumentError: It is the handle of a resource variable, of which each replica
            may have another.
    """
    if not (isinstance(element, tf.Tensor) and is_made_by(element.op)):
        return element
    variable = program.variable_behind(element)
    if getattr(variable, "is_by_reference", False):
        return program.graph.as_graph_element(variable)
    name = element.op.name
    raise errors.ArgumentError(
        errors.compose(
            f"session.run cannot fetch {element.name}: it is the handle of variable "
            f"{name}, and not its value.",
            [
                f"created at {errors.line_of(element.op)}",
                f"fetched at {errors.user_line()}",
            ],
            "fetch the variable itself; or, by name, a tensor that holds its value, as "
            'tf.identity(variable, name="value") does.',
        )
    )
