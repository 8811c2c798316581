# SPDX-License-Identifier: Apache-2.0
"""Models that are compiled with `jit_compile=True`: XLA compiles their forward pass.

And so the backward pass. What replicas communicate, and the optimizer, stay outside:
XLA compiles what runs on one device. Keras' choice "auto" is no on CPUs; elsewhere it
cannot be told from True.
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
    """Builds a model that is to be compiled, by a call that nothing comes of.

    What is compiled makes no variables, so they are made before.

    Args:
        repl: The Replicator.
        model: A Keras model, whose step is about to be built for a batch.
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
        # It communicates, which `forward` refuses in our words.


@contextlib.contextmanager
def forward(model: Any) -> Iterator[None]:
    """In this block, what `model.call` computes is compiled, if the model is to be.

    Args:
        model: A Keras model, whose step is being built for a replica.

    Raises:
        ReplicatorError: The model cannot be compiled so, and True was asked for. Where
            "auto" may have been, it is not compiled, with a warning.
    """
    if not model.jit_compile:
        yield
        return
    original = model.call
    if not _has_call(model):
        error = _refused(
            model,
            "has no call that could be compiled: its step calls other models.",
            "decorate what these compute, @tf.function(jit_compile=True)",
        )
        if only_cpus():
            raise error
        _warn(model, str(error))
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        before = len(model.losses)

        # Masks are no outputs of a function, unless they are returned.
        def masked(*args: Any, **kwargs: Any) -> Any:
            outputs = original(*args, **kwargs)
            if len(model.losses) > before:
                raise _refused(
                    model,
                    "adds losses in its call, which leave the function that is "
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
            return original(*args, **kwargs)
        for output, mask in zip(tf.nest.flatten(outputs), masks, strict=True):
            gathering.set_mask(output, mask)
        return outputs

    with hooks.replaced(model, "call", call):
        yield


def _has_call(model: Any) -> bool:
    """Whether a model is called to compute; else its step does without."""
    import keras

    return type(model).call is not keras.Model.call


def only_cpus() -> bool:
    """Whether Keras has nothing to choose: "auto" is False, and True was asked for."""
    kinds = {device.device_type for device in tf.config.list_physical_devices()}
    return kinds <= {"CPU"}


def _warn(model: Any, why: str) -> None:
    """Says that a model is not compiled, which perhaps only Keras has chosen."""
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
