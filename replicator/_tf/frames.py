# SPDX-License-Identifier: Apache-2.0
"""The Python stack: the user's lines in it, its depth, and whose thread it is of."""

from __future__ import annotations

import os
import sys
import traceback
import types
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.impl import api as autograph_api
from tensorflow.python.util import tf_stack

_LIBRARIES = tuple(
    os.sep + name + os.sep
    for name in ("tensorflow", "keras", "tf_keras", "sonnet", "tree", "optree", "absl")
)
_ROOM = os.path.dirname(__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_GENERATED = "__autograph_generated_file"
_ORIGINAL = "_replicator_original"  # an attribute of ops
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


_Frame = tuple[str, int, str]  # file, line, function


def _is_library(filename: str) -> bool:
    if filename.startswith((_HERE, "<")) or _GENERATED in filename:
        return True
    packages = "site-packages" + os.sep
    if packages in filename:
        return filename.partition(packages[:-1])[2].startswith(_LIBRARIES)
    return filename.startswith(_STANDARD)


def user_frames(
    of: tf.Operation | BaseException | None = None,
) -> list[_Frame]:
    """Returns (file, line, function) of the user's frames, outermost first.

    Of the frames that made an op or that an exception has left, or of those running
    now. `traceback` would show the files that autograph generates; TensorFlow's own
    stack maps them back to what the user wrote, and so is done for an exception's.
    """
    if isinstance(of, BaseException):
        left = traceback.extract_tb(of.__traceback__)
        raised = [(frame.filename, frame.lineno or 0, frame.name) for frame in left]
        return users_of(raised)
    of = getattr(of, _ORIGINAL, of)
    frames: Any = tf_stack.extract_stack() if of is None else of.traceback or ()
    return _users((frame.filename, frame.lineno, frame.name) for frame in frames)


def users_of(frames: Sequence[_Frame]) -> list[_Frame]:
    """Returns those of some frames, (file, line, function), that are the user's.

    Frames of Python's own, as tracebacks have them: see `user_frames`.
    """
    return _users(_as_written(frames))


def _users(frames: Iterable[_Frame]) -> list[_Frame]:
    return [frame for frame in frames if not _is_library(frame[0])]


def _as_written(frames: Sequence[_Frame]) -> Sequence[_Frame]:
    """Returns frames with those of files that autograph generated mapped back.

    TensorFlow keeps these maps with what it has converted, and shows them by no public
    call; the one it attaches to an exception is not ours to leave on the user's.
    """
    if not any(_GENERATED in filename for filename, _, _ in frames):
        return frames
    found: dict[tuple[str, int], _Frame] = {}
    for factories in list(autograph_api._TRANSPILER._cache._cache.values()):
        for factory in factories.values():
            for line, origin in factory.source_map.items():
                found[line.filename, line.lineno] = (
                    *(origin.loc.filename, origin.loc.lineno),
                    origin.function_name or "",
                )
    return [found.get(frame[:2], frame) for frame in frames]


def copy_line(original: tf.Operation, copy: tf.Operation) -> None:
    """Says that the frames of an op are those of another, of which it is a copy.

    What an import adds to a graph has the frames of the import.
    """
    setattr(copy, _ORIGINAL, getattr(original, _ORIGINAL, original))


def passed_user_code(error: BaseException) -> bool:
    """Whether a line of the user's may be among those that an exception has left.

    Code without a file counts, as in a notebook, and so does what autograph generates:
    whose it was, is not said.
    """
    return any(
        _GENERATED in frame.filename
        or not _is_library(frame.filename)
        or (frame.filename.startswith("<") and not frame.filename.startswith(_NO_USERS))
        for frame in traceback.extract_tb(error.__traceback__)
    )


_NO_USERS = ("<frozen", "<__array_function__")


def called_by_runtime() -> bool:
    """Whether TensorFlow's runtime called the code that is running, in a thread of it.

    That is so in what `tf.py_function`, `tf.numpy_function` and a dataset's generator
    run. No public call tells; the outermost frame of such a thread is TensorFlow's.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _CALLS_PYTHON


_CALLS_PYTHON = "tensorflow.python.ops.script_ops"


def stack_depth() -> int:
    """Returns the depth of the Python stack, for `stack_since`."""
    return len(_countable_frames())


def stack_since(depth: int) -> tuple[tuple[str, int], ...]:
    """Returns (file, line) of all deeper frames, as the user wrote them."""
    return tuple((f.filename, f.lineno) for f in _countable_frames()[depth:])


def _countable_frames() -> list[Any]:
    """Returns all frames but this room's, and autograph's, hidden by converted code."""
    return [
        frame
        for frame in tf_stack.extract_stack()
        if not frame.filename.startswith(_ROOM)
        and frame.filename != autograph_api.__file__
    ]
