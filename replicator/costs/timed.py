# SPDX-License-Identifier: Apache-2.0
"""Times a built step; inputs that end are restarted."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from replicator import errors


def run(step: Any) -> float:
    """Returns the seconds from the call of a step until its outputs are available.

    Args:
        step: A step, as `Replicator.build` returns it. If its inputs had ended, the
            second attempt counts.

    Raises:
        InputError: The inputs are empty, even from their start.
    """
    for last in (False, True):
        start = time.perf_counter()
        try:
            outputs = step()
            break
        except tf.errors.OutOfRangeError:
            if last:
                raise errors.InputError(
                    "the inputs do not have one element for each replica, even when "
                    "they are restarted.",
                    [],
                    "let them yield one for each replica, or repeat the dataset, "
                    "dataset.repeat(); they start over by themselves when they end.",
                ) from None
            step.initialize()
    for tensor in tf.nest.flatten(outputs, expand_composites=True):
        if isinstance(tensor, tf.Tensor):
            tensor.numpy()  # waits for it
    return time.perf_counter() - start
