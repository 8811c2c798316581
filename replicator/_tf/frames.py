# SPDX-License-Identifier: Apache-2.0
"""The Python stack: the user's lines, its depth, and which thread it belongs to."""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.impl import api as autograph_api
from tensorflow.python.util import tf_stack

_LIBRARIES = tuple(
    os.sep + name + os.sep
    for name in (
        *("tensorflow", "tensorboard", "keras", "tf_keras", "sonnet"),
        *("tree", "optree", "absl"),
    )
)
_ROOM = os.path.dirname(__file__) + os.sep
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# The names of the folders of installed packages: pip's, and Debian's.
_PACKAGES = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))
# pip's --target, say, installs into a folder of any name, which may be the user's own.
_SITE_PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(tf.__file__)))
_SITE_LIBRARIES = tuple(_SITE_PACKAGES + library for library in _LIBRARIES)
GENERATED = "__autograph_generated_file"
_ORIGINAL = "_replicator_original"  # an attribute of ops
_COPIED = "_replicator_copied"
_built_from: contextvars.ContextVar[tuple[tf.Operation, ...]] = contextvars.ContextVar(
    "replicator_built_from", default=()
)
STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


_Frame = tuple[str, int, str]  # file, line, function


def _is_library(filename: str) -> bool:
    if filename.startswith("<") or GENERATED in filename or is_inside(filename):
        return True
    return filename.startswith(STANDARD) and not is_installed(filename)


def is_inside(filename: str) -> bool:
    """Whether a file is of this package, or one of those that it uses."""
    if filename.startswith((PACKAGE, *_SITE_LIBRARIES)):
        return True
    for packages in _PACKAGES:
        _, separator, path = filename.partition(packages)
        if separator:
            return (os.sep + path).startswith(_LIBRARIES)
    return False


def is_installed(filename: str) -> bool:
    """Whether a file is in a folder of installed packages, the user's or others'."""
    return any(packages in filename for packages in _PACKAGES)


def user_frames(
    of: tf.Operation | BaseException | None = None,
) -> list[_Frame]:
    """Returns (file, line, function) of the user's frames, outermost first.

    `traceback` would show the files that AutoGraph generates; TensorFlow's own stack
    maps them back to the user's source, and an exception's frames are mapped here.

    Args:
        of: An op, for the frames that created it; an exception, for its traceback; or
            None, for the running code (see `on_behalf_of`).
    """
    if isinstance(of, BaseException):
        summaries = traceback.extract_tb(of.__traceback__)
        error_frames = [(f.filename, f.lineno or 0, f.name) for f in summaries]
        if not any(GENERATED in filename for filename, _, _ in error_frames):
            error_frames += lines_in_notes(of)  # the traceback may have been shortened
        return users_of(error_frames)
    if of is None and (ops := _built_from.get()):
        # Ops of functions that only the runtime knows have no frames; callers have.
        return next(filter(None, map(user_frames, reversed(ops))), [])
    of = getattr(of, _ORIGINAL, of)
    frames: Any = tf_stack.extract_stack() if of is None else of.traceback or ()
    return _users((frame.filename, frame.lineno, frame.name) for frame in frames)


def users_of(frames: Sequence[_Frame]) -> list[_Frame]:
    """Filters (file, line, function) frames for the user's.

    Takes frames as Python's tracebacks hold them; see `user_frames`.
    """
    return _users(_as_written(frames))


def _users(frames: Iterable[_Frame]) -> list[_Frame]:
    return [frame for frame in frames if not _is_library(frame[0])]


def _as_written(frames: Sequence[_Frame]) -> Sequence[_Frame]:
    """Maps frames in files that AutoGraph generated to the user's source.

    TensorFlow keeps these maps with its converted functions and has no public call for
    them; the one it attaches to an exception must not stay on the user's exception.
    """
    if not any(GENERATED in filename for filename, _, _ in frames):
        return frames
    sources: dict[tuple[str, int], _Frame] = {}
    for factories in list(autograph_api._TRANSPILER._cache._cache.values()):
        for factory in factories.values():
            for line, origin in factory.source_map.items():
                sources[line.filename, line.lineno] = (
                    origin.loc.filename,
                    origin.loc.lineno,
                    origin.function_name or "",
                )
    return [sources.get(frame[:2], frame) for frame in frames]


IN_USER_CODE = "in user code:"  # begins the note that `call_converted` adds
_FRAME_LINE = re.compile(r'  File "(.*)", line (\d+), in (.*)')


def lines_in_notes(error: BaseException) -> list[_Frame]:
    """Returns the user's lines in converted code that are noted on an exception."""
    notes = getattr(error, "__notes__", ())
    text = "".join(note for note in notes if note.startswith(IN_USER_CODE))
    return [(file, int(line), name) for file, line, name in _FRAME_LINE.findall(text)]


def written_by_library() -> bool:
    """Whether a layer or optimizer of a library is running, and no code of the user's.

    What the innermost of the two writes is its own. Methods of variables belong to
    neither, whoever wrote them.
    """
    for frame in reversed(tf_stack.extract_stack()):
        if not _is_library(frame.filename):
            return False
        if _LAYERS.search(frame.filename.replace(os.sep, "/")):
            return True
    return False


_LAYERS = re.compile(
    r"/((tf_)?keras/src/(layers|optimizers)/|sonnet/src/(?!(base|metrics|utils)\.)"
    r"|tensorflow/python/(keras/layers|training)/)"
)


def copy_line(original: tf.Operation, copy: tf.Operation) -> None:
    """Gives a copied op the frames of its original.

    Otherwise an imported op has the frames of the import.
    """
    setattr(copy, _ORIGINAL, getattr(original, _ORIGINAL, original))
    setattr(copy, _COPIED, original)


def copied_from(op: tf.Operation) -> tf.Operation:
    """Returns the op that an op is a copy of, by `copy_line`, or the op itself."""
    original: tf.Operation = getattr(op, _COPIED, op)
    return original


@contextlib.contextmanager
def on_behalf_of(op: tf.Operation) -> Iterator[None]:
    """Makes the user's line in this block the one that created an op.

    What is built from an op of another graph belongs to the user's line of that op: no
    code of the user's is running.

    Args:
        op: An op, of any graph.
    """
    token = _built_from.set((*_built_from.get(), op))
    try:
        yield
    finally:
        _built_from.reset(token)


def passed_user_code(error: BaseException) -> bool:
    """Whether an exception's traceback may contain a line of the user's.

    Code without a file counts, as in a notebook, and so does code that AutoGraph
    generates, since nothing says whose it was.
    """
    return any(
        GENERATED in frame.filename or may_be_users(frame.filename)
        for frame in traceback.extract_tb(error.__traceback__)
    )


def is_users(filename: str) -> bool:
    """Whether the code of a file, or of none, is the user's and is not installed."""
    return may_be_users(filename) and not is_installed(filename)


def may_be_users(filename: str) -> bool:
    if filename.startswith("<"):
        return not filename.startswith(_NO_USERS)
    return not _is_library(filename)


_NO_USERS = ("<frozen", "<__array_function__")


def stack_depth() -> int:
    """Returns the depth of the Python stack, for `stack_since`."""
    return len(_countable_frames())


def stack_since(depth: int) -> tuple[tuple[str, int], ...]:
    """Returns (file, line) of all deeper frames, mapped back to the user's source."""
    return tuple((f.filename, f.lineno) for f in _countable_frames()[depth:])


def _countable_frames() -> list[Any]:
    """Returns all frames but this package's and AutoGraph's, which conversion adds."""
    return [
        frame
        for frame in tf_stack.extract_stack()
        if not frame.filename.startswith(_ROOM)
        and frame.filename != autograph_api.__file__
    ]
