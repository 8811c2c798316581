# SPDX-License-Identifier: Apache-2.0
"""Files of a model are whole: a new one takes the old one's place once it is written.

Keras writes into the file itself. If a host is lost meanwhile, whose variables cannot
be read any more, what is left is neither the old file nor a new one, but may be loaded:
BackupAndRestore would go on with an optimizer that has forgotten everything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

# Methods of models, and how the names of what they write end.
_METHODS = {"save_weights": (".weights.h5",), "save": (".keras", ".h5", ".hdf5")}


def keep_whole(model: Any) -> None:
    """Gives a model methods that write whole files, in place of Keras'.

    Args:
        model: The Keras model.
    """
    for name, endings in _METHODS.items():
        setattr(model, name, _writer(weakref.ref(model), name, endings))


def _writer(kept: Any, name: str, endings: tuple[str, ...]) -> Callable[..., Any]:
    """Returns one of a model's methods that write files.

    Args:
        kept: Returns the model.
        name: Of the method.
        endings: Of files that it writes; what else it is asked for is Keras' matter.
    """

    def write(filepath: Any, overwrite: bool = True, *more: Any, **options: Any) -> Any:
        model = kept()
        method = getattr(type(model), name)
        place = None if more or options else _local(filepath, endings)
        if place is None or (os.path.exists(place) and not overwrite):
            return method(model, filepath, overwrite, *more, **options)
        folder, base = os.path.split(place)
        with tempfile.TemporaryDirectory(prefix=f".{base}.", dir=folder) as beside:
            written = os.path.join(beside, base)
            result = method(model, written, overwrite)
            with contextlib.suppress(OSError):  # there is none yet
                shutil.copymode(place, written)
            os.replace(written, place)
        return result

    write.__name__ = name
    return write


def _local(filepath: Any, endings: tuple[str, ...]) -> str | None:
    """Returns where a file is on this host, if another can be put in its place."""
    if not isinstance(filepath, str | os.PathLike):
        return None
    path = os.fspath(filepath)
    if not isinstance(path, str) or not path.endswith(endings):
        return None
    place = os.path.realpath(path)
    if os.path.exists(place) and not os.path.isfile(place):
        return None
    # Names of other hosts' files ("gs://...") are of folders that do not exist here.
    return place if os.access(os.path.dirname(place), os.W_OK | os.X_OK) else None
