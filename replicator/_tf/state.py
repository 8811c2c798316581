# SPDX-License-Identifier: Apache-2.0
"""State that outlives the program: checkpoints and saved models."""

from __future__ import annotations

from typing import Any

from tensorflow.python.saved_model import save_context as _save_context
from tensorflow.python.training.saving import saveable_object


def in_save_context() -> bool:
    """Whether a SavedModel is being written, in whose functions variables are plain."""
    return bool(_save_context.in_save_context())


def track(parent: Any, name: str, child: Any) -> None:
    """Makes checkpoints of `parent` include `child`, and runs its deferred restoration.

    Assigning an attribute does so for some classes only, not for v1 optimizers; and a
    tf.Module would count the child's variables among its own.
    """
    parent._track_trackable(child, name, overwrite=True)


# The v1 Saver's interface to objects that save themselves.
SaveableObject = saveable_object.SaveableObject
SaveSpec = saveable_object.SaveSpec
