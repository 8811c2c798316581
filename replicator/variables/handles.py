# SPDX-License-Identifier: Apache-2.0
"""Who takes the handle of a variable outside a step, and may write by it.

The writes of tf.compat.v1, of older optimizers and of raw ops are not methods of a
variable: they take its handle and write a single component.
"""

from __future__ import annotations

import re
from typing import Any

from replicator import errors
from replicator._tf import callers
from replicator.variables import python_calls

_LIBRARIES = re.compile(r"(tensorflow|tf_keras|keras|sonnet|replicator)\.")
# Of them, the modules that write by handles.
_WRITERS = re.compile(
    r"tensorflow\.python\.(ops\.state_ops$|training\.(?!saving))"
    r"|(tensorflow\.python\.keras|tf_keras)\.(.*\.)?optimizer"
)
_FREEZERS = "tensorflow.python.framework.convert_to_constants"


def may_write(variable: Any, why: str) -> bool:
    """Whether the running reader of a variable's `handle` may write by it.

    Code outside of TensorFlow and its kin may do anything with a handle.

    Args:
        variable: The ReplicatedVariable or PartitionedVariable.
        why: Why it cannot be written so: "but it is split into 3 parts"; "" if it can.

    Raises:
        ContextError: It may, and cannot; or a function that a step calls may.
    """
    asker = callers.asker("handle")
    if _LIBRARIES.match(asker.module) and not _WRITERS.match(asker.module):
        return False
    python_calls.refuse_write(variable)
    if not why:
        return True
    who, fix = (
        "code outside of TensorFlow",
        ("call its own methods, or take the handle of a component, v.components[0]."),
    )
    if asker.module.endswith(".state_ops"):
        who = f"tf.compat.v1.{asker.function}"
        fix = f"call the variable's own method {asker.function}."
    elif _WRITERS.match(asker.module):
        family = "tf.compat.v1.train"
        if asker.module.startswith(("tf_keras", "tensorflow.python.keras")):
            family = "legacy Keras, of the older kind,"
        who = f"an optimizer of {family}"
        fix = "wrap the optimizer, and apply its gradients inside a step_fn."
    raise errors.ContextError(
        f"{who} takes the handle of variable {variable.name} outside a step, {why}.",
        fix=fix,
    )


def check_freezing(variable: Any, why: str) -> None:
    """Raises UnsupportedError if a function is frozen that reads the variable.

    That puts the value in place of the handle.

    Args:
        variable: A PartitionedVariable, whose handle has no value.
        why: Why it has none.
    """
    if callers.asker("handle").module == _FREEZERS:
        raise errors.UnsupportedError(
            f"a function is frozen or converted that reads variable {variable.name}, "
            f"{why}.",
            fix="save it by tf.saved_model.save, and freeze or convert what is saved.",
        )
