# SPDX-License-Identifier: Apache-2.0
"""Makes a Keras 3 model train, test and predict on replicas.

Keras obtains the function that it calls per batch from the model's
`make_train_function`, `make_test_function` and `make_predict_function`: public methods,
which models override. They are replaced on the model object, and so are those that
write files (files.py); its class, its config and what it saves stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors, options
from replicator._tf import autograph
from replicator.cluster.peers import Peers
from replicator.keras import executions, files, functions, state
from replicator.primitives import base

_NAMES = ("train", "test", "predict")


def replicate(repl: Any, model: Any, local_statistics: bool = False) -> Any:
    """Makes a model run on replicas; see Replicator.keras_model.

    Args:
        repl: The Replicator.
        model: As for `keras_model`.
        local_statistics: Likewise.
    """
    _check(model)
    options.check("keras_model", "local_statistics", local_statistics, (False, True))
    if local_statistics:
        repl = repl._with(local_statistics=True)
    _refuse_own_functions(model)
    if repl._settings.peers is not None:
        _check_seed(repl._settings.peers)
        files.refuse_backups(model, repl._settings.peers)
    state.prepare(repl, model)
    for name in _NAMES:
        make = functools.partial(_made, repl, name)
        files.replace(model, f"make_{name}_function", make)
        setattr(model, f"{name}_function", None)
    files.keep_whole(model)
    return model


def _check(model: Any) -> None:
    import keras

    if not isinstance(model, keras.Model):
        raise base.bad_argument(
            "keras_model",
            f"was given {errors.repr_of(model)}",
            "pass a Keras 3 model, created under `with repl.context():`; of a legacy "
            "Keras model, run the step, repl.run(model.train_step, input_fn), with a "
            "wrapped optimizer.",
        )


def _refuse_own_functions(model: Any) -> None:
    """Raises ArgumentError if a model makes the functions that fit calls itself.

    They would be replaced, and what the user's do would not happen.
    """
    import keras

    for name in _NAMES:
        method = f"make_{name}_function"
        on_object = vars(model).get(method)
        on_class = getattr(type(model), method)
        if getattr(on_object, "_replicator_made", False):
            on_object = None  # by an earlier keras_model
        own = on_object or on_class
        if own is getattr(keras.Model, method):
            method = f"{name}_function"
            own = getattr(model, method, None)
            if own is None or _is_made_by_fit(own):
                continue
        raise errors.ArgumentError(
            f"the model {model.name}, of class {type(model).__name__}, has its own "
            f"{method}, which keras_model would replace: what it does would not "
            "happen.",
            errors.sites_of(method, own),
            f"put it into {name}_step, which runs on each replica.",
        )


def _is_made_by_fit(function: Any) -> bool:
    """Whether Keras or keras_model made a function, with no user's code around it."""
    while function is not None:
        function = autograph.function_of(function)
        # Not its __module__, which functools.wraps copies.
        home = getattr(function, "__globals__", {}).get("__name__")
        home = home or type(function).__module__
        if home.partition(".")[0] not in ("keras", "replicator", "tensorflow"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _check_seed(peers: Peers) -> None:
    """Raises unless Keras shuffles equally in all processes."""
    seed, _ = tf.compat.v1.random.get_seed(None)
    fix = "call keras.utils.set_random_seed(...) at the beginning of the program."
    if seed is None:
        raise errors.ContextError(
            "keras_model was called in between-graph mode without a random seed: fit "
            "would shuffle differently on every host.",
            fix=fix,
        )
    peers.check_equal("shuffles by a random seed", int(seed), fix)


def _made(repl: Any, name: str, model: Any, force: bool = False) -> Any:
    """Is a model's make_..._function method: makes the function that Keras calls.

    Args:
        repl: The Replicator.
        name: "train", "test" or "predict".
        model: The model.
        force: Whether to make it anew.
    """
    attribute = f"{name}_function"
    if getattr(model, attribute) is None or force:
        state.prepare(repl, model)
        setattr(model, attribute, _function(repl, model, name))
    return getattr(model, attribute)


def _function(repl: Any, model: Any, name: str) -> Callable[..., Any]:
    """Returns the function that a model calls per batch, or per several batches."""
    step = functions.step_of(model, f"{name}_step")
    if model.jit_compile:
        _warn_of_jit_compile(model)
    if model.run_eagerly:
        function: Any = functions.eagerly(repl, model, step)
    else:
        declared = functools.partial(functions.declared, model)
        function = functions.BatchFunction(step, repl, declared)
    if name == "predict":
        return functions.over_list(function)
    return executions.over_iterator(function, model.steps_per_execution)


def _warn_of_jit_compile(model: Any) -> None:
    """Warns once that a model runs uncompiled.

    Not where there are GPUs: Keras' choice "auto" cannot be told from True there.
    """
    devices = tf.config.list_physical_devices()
    if all(device.device_type == "CPU" for device in devices):
        logging.log_first_n(
            logging.WARNING,
            "%s",
            1,
            errors.compose(
                f"the model {model.name} is compiled with jit_compile=True, but runs "
                "without XLA: its step is divided among the replicas op by op, with "
                "the same results.",
                [f"at {errors.user_line()}"],
                "leave out jit_compile=True.",
            ),
        )
