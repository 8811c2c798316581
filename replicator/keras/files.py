# SPDX-License-Identifier: Apache-2.0
"""Writes a model's files atomically: each replaces the old one once it is complete.

Keras writes into the file itself. If a host whose variables are needed is lost
meanwhile, what remains is neither the old file nor a new one, but may still load:
BackupAndRestore would resume with an optimizer that has lost its state.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

# Methods of models, with the endings of the file names they write.
_METHODS = {"save_weights": (".weights.h5",), "save": (".keras", ".h5", ".hdf5")}


def keep_whole(model: Any) -> None:
    """Replaces a model's save methods by ones that write files atomically.

    Args:
        model: The Keras model.
    """
    for name, endings in _METHODS.items():
        setattr(model, name, _writer(weakref.ref(model), name, endings))


def _writer(kept: Any, name: str, endings: tuple[str, ...]) -> Callable[..., Any]:
    """Returns the atomic version of one of a model's save methods.

    Args:
        kept: A weak reference to the model.
        name: The method.
        endings: The file name endings to handle; anything else is left to Keras.
    """

    def write(filepath: Any, overwrite: bool = True, *more: Any, **options: Any) -> Any:
        model = kept()
        method = getattr(type(model), name)
        target = None if more or options else _local(filepath, endings)
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

    write.__name__ = name
    return write


def _local(filepath: Any, endings: tuple[str, ...]) -> str | None:
    """Returns a file's real path if it is local and can be replaced by another."""
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
