# SPDX-License-Identifier: Apache-2.0
"""The files that a model writes: each replaces the old one once it is complete.

Keras writes into the file itself. If a host whose variables are needed is lost
meanwhile, what remains is neither the old file nor a new one, but may still load:
BackupAndRestore would resume with an optimizer that has lost its state.

Where several processes run one fit, BackupAndRestore is rejected: each process would
write, read and delete its own files, and resume from another epoch after a fault.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

from replicator import errors
from replicator.cluster.peers import Peers

# Methods of models, with the endings of the file names they write.
_METHODS = {"save_weights": (".weights.h5",), "save": (".keras", ".h5", ".hdf5")}


def replace(model: Any, name: str, method: Callable[..., Any]) -> None:
    """Replaces a method of a model object, which is not kept by that.

    Args:
        model: The Keras model.
        name: The method.
        method: Takes the model and the method's arguments.
    """
    kept = weakref.ref(model)

    def call(*given: Any, **named: Any) -> Any:
        return method(kept(), *given, **named)

    call.__name__ = name
    vars(call)["_replicator_made"] = True
    setattr(model, name, call)


def keep_whole(model: Any) -> None:
    """Replaces a model's save methods by ones that write files atomically.

    Args:
        model: The Keras model.
    """
    for name in _METHODS:
        replace(model, name, functools.partial(_write, name))


def _write(
    name: str,
    model: Any,
    filepath: Any,
    overwrite: bool = True,
    *more: Any,
    **options: Any,
) -> Any:
    """Calls one of a model's save methods; replaces the file by what it writes."""
    method = getattr(type(model), name)
    target = None if more or options else _local(filepath, _METHODS[name])
    if target is None or (os.path.exists(target) and not overwrite):
        return method(model, filepath, overwrite, *more, **options)
    folder, base = os.path.split(target)
    with tempfile.TemporaryDirectory(prefix=f".{base}.", dir=folder) as scratch:
        written = os.path.join(scratch, base)
        result = method(model, written, overwrite)
        with contextlib.suppress(OSError):  # no file there yet
            shutil.copymode(target, written)
        os.replace(written, target)
    return result


def _local(filepath: Any, endings: tuple[str, ...]) -> str | None:
    """Returns a file's real path if it is local and can be replaced by another.

    Args:
        filepath: The file, as it was given.
        endings: Of the names to handle; anything else is left to Keras.
    """
    if not isinstance(filepath, str | os.PathLike):
        return None
    path = os.fspath(filepath)
    if not isinstance(path, str) or not path.endswith(endings):
        return None
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        return None
    # Remote names ("gs://...") have folders that do not exist here.
    return target if os.access(os.path.dirname(target), os.W_OK | os.X_OK) else None


def refuse_backups(model: Any, peers: Peers) -> None:
    """Replaces a model's `fit` by one that rejects BackupAndRestore.

    Args:
        model: The Keras model.
        peers: The processes.
    """
    replace(model, "fit", functools.partial(_fit, peers))


def _fit(peers: Peers, model: Any, *given: Any, **named: Any) -> Any:
    import keras

    method = type(model).fit
    callbacks = _callbacks(method, (model, *given), named)
    if any(isinstance(one, keras.callbacks.BackupAndRestore) for one in callbacks):
        with peers.telling():
            raise errors.ContextError(
                "fit was given BackupAndRestore in between-graph mode: every host "
                "would have a backup of its own, and after a fault these could be of "
                "different steps.",
                fix="save `cluster.checkpoint(folder, model=model)` in a callback, at "
                "the end of each epoch, and pass its `step` to fit as initial_epoch; "
                "the guide 'When a host fails' has an example.",
            )
    return method(model, *given, **named)


def _callbacks(method: Any, given: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
    """Returns the callbacks among the arguments of fit."""
    try:
        arguments = inspect.signature(method).bind_partial(*given, **named).arguments
    except TypeError:  # the method's own error is better
        return []
    callbacks = arguments.get("callbacks", named.get("callbacks"))
    callbacks = getattr(callbacks, "callbacks", callbacks)  # for a CallbackList
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
