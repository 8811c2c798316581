# SPDX-License-Identifier: Apache-2.0
"""What outlives a program: checkpoints and saved models."""

from __future__ import annotations

from typing import Any

from tensorflow.python.saved_model import save_context as _save_context
from tensorflow.python.training.saving import saveable_object


def in_save_context() -> bool:
    """Whether a SavedModel is being made, in whose functions variables are plain."""
    return bool(_save_context.in_save_context())


def track(parent: Any, name: str, child: Any) -> None:
    """Has checkpoints of `parent` hold `child`, and restores it if one waits for it.

    Setting an attribute does so for some classes only, not for v1 optimizers; and those
    that are a tf.Module would count the child's variables among their own.
    """
    parent._track_trackable(child, name, overwrite=True)


# How the v1 Saver is told what to save, and how.
SaveableObject = saveable_object.SaveableObject
SaveSpec = saveable_object.SaveSpec
