# SPDX-License-Identifier: Apache-2.0
"""Runs whole batches on one device, op by op, exactly as Keras would.

Used for models compiled with `run_eagerly=True`, so that their tensors have values to
inspect. Variables created here are replicated, and assignments reach all replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from replicator.keras import functions, state


def eagerly(repl: Any, model: Any, step: functions.Step) -> Callable[..., Any]:
    """Returns a function that runs a model's step, without a trace, on one device.

    Args:
        repl: The Replicator.
        model: The Keras model.
        step: Its step.
    """
    device = repl._settings.world.devices[0]
    if repl.num_replicas > 1:
        logging.log_first_n(
            logging.WARNING,
            "The model %s is compiled with run_eagerly=True, which is for debugging: "
            "its whole batches run on one device, %s, op by op, with the same "
            "results. Compile it with run_eagerly=False to run on all %d replicas.",
            1,
            model.name,
            device,
            repl.num_replicas,
        )

    def run(data: Any, spec: Any = None) -> Any:
        with repl.context(), tf.device(device), _accumulating(model):
            return step(functions.tensors_of(data))

    return run


@contextlib.contextmanager
def _accumulating(model: Any) -> Iterator[None]:
    """Makes wrapped optimizers accumulate gradients outside of steps in this block."""
    combiners = [o._replicator_combiner for o in state.wrapped_in(model)]
    settings = [combiner.alone for combiner in combiners]
    for combiner in combiners:
        combiner.alone = True
    try:
        yield
    finally:
        for combiner, previous in zip(combiners, settings, strict=True):
            combiner.alone = previous
