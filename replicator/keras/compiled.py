# SPDX-License-Identifier: Apache-2.0
"""Compiles the forward pass of models with `jit_compile=True` by XLA.

The backward pass follows. Communication and the optimizer stay outside, since XLA
compiles for one device. Keras' choice "auto" means no on CPUs; elsewhere it cannot be
told from True.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.keras import gathering, hooks

_do_not_convert = tf.autograph.experimental.do_not_convert


def build(repl: Any, model: Any, data: Any) -> None:
    """Builds a model that will be compiled, by a call whose results are discarded.

    Compiled functions cannot create variables, so they are created before.

    Args:
        repl: The Replicator.
        model: A Keras model whose step is about to be built for a batch.
        data: The batch, as its step takes it.
    """
    import keras

    if not model.jit_compile or model.built:
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    function = tf.function(_do_not_convert(lambda: model(x)))
    try:
        with repl.context():
            function.get_concrete_function()
    except NotImplementedError:
        if _has_call(model):
            raise
    except errors.ContextError as error:
        if errors.called_outside(error) is None:
            raise
        # The model communicates: `forward` raises our own error for that.


@contextlib.contextmanager
def forward(model: Any) -> Iterator[None]:
    """Compiles `model.call` in this block, if the model asks for it.

    Args:
        model: A Keras model whose step is being built for a replica.

    Raises:
        ReplicatorError: The model cannot be compiled this way although the user asked
            for it. Where Keras' "auto" may have asked, the model runs uncompiled, with
            a warning.
    """
    if not model.jit_compile:
        yield
        return
    original = model.call
    if not _has_call(model):
        error = _refused(
            model,
            "has no call that could be compiled: its step calls other models.",
            "decorate what these compute with @tf.function(jit_compile=True)",
        )
        if only_cpus():
            raise error
        _warn(model, str(error))
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        num_losses = len(model.losses)

        # A function drops its tensors' masks unless it returns them.
        def masked(*args: Any, **kwargs: Any) -> Any:
            outputs = original(*args, **kwargs)
            if len(model.losses) > num_losses:
                raise _refused(
                    model,
                    "adds losses in its call, which escape the function that is "
                    "compiled.",
                    "compute them in compute_loss",
                )
            return outputs, [gathering.mask_of(o) for o in tf.nest.flatten(outputs)]

        function = tf.function(_do_not_convert(masked), jit_compile=True)
        try:
            outputs, masks = function(*args, **kwargs)
        except errors.ReplicatorError as error:
            if only_cpus():
                raise
            _warn(model, str(error))
            _forget_losses(model)
            return original(*args, **kwargs)
        for output, mask in zip(tf.nest.flatten(outputs), masks, strict=True):
            gathering.set_mask(output, mask)
        return outputs

    with hooks.replaced(model, "call", call):
        yield


def _forget_losses(model: Any) -> None:
    """Drops the losses that a failed attempt to compile a model's call has added.

    Keras drops them when a model is called, which has happened; there is no other way.
    """
    model._clear_losses()


def _has_call(model: Any) -> bool:
    """Whether a model defines `call`; otherwise its step works without."""
    import keras

    return type(model).call is not keras.Model.call


def only_cpus() -> bool:
    """Whether there are only CPUs, where "auto" means False and True is explicit."""
    kinds = {device.device_type for device in tf.config.list_physical_devices()}
    return kinds <= {"CPU"}


def _warn(model: Any, why: str) -> None:
    """Warns that a model runs uncompiled, since Keras may have chosen to compile it."""
    logging.log_first_n(
        logging.WARNING,
        "The model %s runs without XLA, though its jit_compile is True (as it is by "
        "Keras' default where there is an accelerator): %s",
        1,
        model.name,
        why,
    )


def _refused(model: Any, problem: str, fix: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        errors.compose(
            f"the model {model.name} is compiled with jit_compile=True, but {problem}",
            [f"at {errors.user_line()}"],
            f"{fix}; or compile it with jit_compile=False.",
        )
    )
