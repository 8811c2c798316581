# SPDX-License-Identifier: Apache-2.0
"""Warns where Keras' own loop trains variables of several replicas on one device."""

from __future__ import annotations

import weakref
from typing import Any

from absl import logging

from replicator._tf import callers

_told: weakref.WeakSet[Any] = weakref.WeakSet()  # the optimizers of which it was said


def warn_of_one_device(variable: Any) -> None:
    """Warns, once per optimizer, if Keras' loop trains a variable outside of steps.

    Args:
        variable: A ReplicatedVariable that is being written outside of any step.
    """
    count = variable.world.num_replicas
    if count == 1 or not variable.trainable:
        return
    loop = callers.keras_loop()
    optimizer = None if loop is None else callers.applying_optimizer()
    if optimizer is None or optimizer in _told:
        return
    _told.add(optimizer)
    logging.warning(
        "Keras' %s updates %s, a variable of %d replicas, by %s outside of any step: "
        "it trains on one device, and the others do nothing. To run on all of them, "
        "use repl.keras_model(model), or with AutoDist autodist.keras_model(model); or "
        "wrap the optimizer and write the loop, with "
        "repl.run(model.train_step, input_fn).",
        loop,
        variable.name,
        count,
        type(optimizer).__name__,
    )
