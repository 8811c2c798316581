# SPDX-License-Identifier: Apache-2.0
"""Runs a built step to its end, for those who measure: inputs that end start over."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from replicator import errors


def run(step: Any) -> float:
    """Returns the seconds of a step, until its outputs are there.

    Args:
        step: As `Replicator.build` returns it. Where inputs had ended, it is the second
            attempt that counts.

    Raises:
        InputError: There is nothing in the inputs, even from their start.
    """
    for last in (False, True):
        start = time.perf_counter()
        try:
            outputs = step()
            break
        except tf.errors.OutOfRangeError:
            if last:
                raise errors.InputError(
                    errors.compose(
                        "the inputs have no element for each replica, not even when "
                        "they are started anew.",
                        [],
                        "give them one at least; they start over by themselves when "
                        "they end.",
                    )
                ) from None
            step.initialize()
    for tensor in tf.nest.flatten(outputs, expand_composites=True):
        if isinstance(tensor, tf.Tensor):
            tensor.numpy()  # waits for it
    return time.perf_counter() - start
