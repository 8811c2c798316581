# SPDX-License-Identifier: Apache-2.0
"""Runs whole batches on one device, op by op, exactly as Keras would.

Used for models compiled with `run_eagerly=True`, so that their tensors have values to
inspect. Variables created here are replicated, and assignments reach all replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.keras import state


def run(repl: Any, model: Any, name: str, data: Any) -> Any:
    """Runs a batch on one device.

    Args:
        repl: The Replicator.
        model: The Keras model.
        name: The method to call, such as "train_step".
        data: The global batch.

    Returns:
        The method's result.

    Raises:
        ContextError: The method communicates.
    """
    try:
        with (
            repl.context(),
            tf.device(repl._settings.world.devices[0]),
            _accumulating(model),
        ):
            return getattr(model, name)(data)
    except errors.ContextError as error:
        call = errors.called_outside(error)
        if call is None:
            raise
        raise refused(model, name, call) from error


def warn_of_run_eagerly(repl: Any, model: Any) -> None:
    """Warns once that a model does not train on replicas."""
    if repl.num_replicas > 1:
        logging.log_first_n(
            logging.WARNING,
            "The model %s is compiled with run_eagerly=True, which is for debugging: "
            "its whole batches run on one device, %s, op by op, with the same "
            "results. Compile it with run_eagerly=False to run on all %d replicas.",
            1,
            model.name,
            repl._settings.world.devices[0],
            repl.num_replicas,
        )


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


def refused(model: Any, name: str, outside: tuple[str, str]) -> errors.ContextError:
    """Returns the error for a step of a model that communicates.

    Args:
        model: The Keras model.
        name: The method, such as "train_step".
        outside: What was called, and at which line.
    """
    call, line = outside
    return errors.ContextError(
        errors.compose(
            f"{call} was called in {name} of the model {model.name}, which is written "
            "for one device and whole batches: there is no other replica to "
            "communicate with.",
            [f"at {line}"],
            f"leave {call} out: means, sums and metrics are those of the whole batch.",
        )
    )
