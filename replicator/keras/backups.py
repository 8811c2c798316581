# SPDX-License-Identifier: Apache-2.0
"""Rejects Keras' backups where several processes run one fit.

Each process would write, read and delete its own files: after a fault they would resume
from different epochs.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from replicator import errors
from replicator.cluster.peers import Peers


def refuse(model: Any, peers: Peers) -> None:
    """Replaces a model's `fit` by one that rejects BackupAndRestore.

    Args:
        model: The Keras model.
        peers: The processes.
    """
    model_ref = weakref.ref(model)

    def fit(*given: Any, **named: Any) -> Any:
        model: Any = model_ref()
        method = type(model).fit
        if _has_backup(_callbacks(method, (model, *given), named)):
            with peers.telling():
                raise errors.ContextError(
                    errors.compose(
                        "fit was given BackupAndRestore in between-graph mode: every "
                        "host would have a backup of its own, and after a fault these "
                        "could be of different steps.",
                        [f"at {errors.user_line()}"],
                        "save `cluster.checkpoint(folder, model=model)` in a callback, "
                        "at the end of each epoch, and pass its `step` to fit as "
                        "initial_epoch; the guide to several hosts has an example.",
                    )
                )
        return method(model, *given, **named)

    model.fit = fit


def _callbacks(method: Any, given: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """Returns the callbacks among the arguments of fit."""
    try:
        arguments = inspect.signature(method).bind_partial(*given, **named).arguments
    except TypeError:  # the method's own error is better
        return []
    callbacks = arguments.get("callbacks", named.get("callbacks"))
    callbacks = getattr(callbacks, "callbacks", callbacks)  # for a CallbackList
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def _has_backup(callbacks: list[Any]) -> bool:
    import keras

    return any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks)
