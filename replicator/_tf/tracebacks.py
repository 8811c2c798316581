# SPDX-License-Identifier: Apache-2.0
"""Shortens tracebacks to the user's frames, as TensorFlow does for its functions."""

from __future__ import annotations

import sys
import types

import tensorflow as tf

from replicator._tf import frames


def shorten(error: BaseException) -> None:
    """Leaves only the user's frames in an exception's traceback.

    As TensorFlow does, unless `tf.debugging.disable_traceback_filtering()` was called.
    Of converted code, the user's lines are in a note of the exception. Does nothing if
    this package called the caller, or raised what may be its own fault.
    """
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(frames.PACKAGE):
        frame = frame.f_back
    enabled = tf.debugging.is_traceback_filtering_enabled()
    if frame is not None or not enabled or _may_be_ours(error):
        return
    seen: set[BaseException] = set()
    chained: BaseException | None = error
    while chained is not None and chained not in seen:
        seen.add(chained)
        context = chained.__context__
        if context is not None and not frames.passed_user_code(context):
            chained.__context__ = None  # what AutoGraph tried, say
        chained.__traceback__ = _shortened(chained)
        chained = chained.__cause__ or chained.__context__


def _may_be_ours(error: BaseException) -> bool:
    """Whether an exception may be due to a fault of this package."""
    if isinstance(error, tf.errors.OpError) or _says_lines(error):
        return False
    for trace in reversed(_entries(error)):
        filename = trace.tb_frame.f_code.co_filename
        if frames.GENERATED in filename or frames.may_be_users(filename):
            return False
        if filename.startswith(frames.PACKAGE):
            return True
    return False


def _says_lines(error: BaseException) -> bool:
    """Whether an exception's text or notes have the user's lines."""
    return hasattr(type(error), "ag_pass_through") or bool(frames.lines_in_notes(error))


def _shortened(error: BaseException) -> types.TracebackType | None:
    """Returns the entries of the user's frames in a traceback."""
    user_entries: list[types.TracebackType] = []
    entries, has_lines = _entries(error), _says_lines(error)
    last = max((k for k, e in enumerate(entries) if _is_shown(e)), default=-1)
    keeps = False
    for k, entry in enumerate(entries):
        filename = entry.tb_frame.f_code.co_filename
        if frames.GENERATED in filename:
            keeps = not has_lines or k < last
        elif not filename.startswith(frames.STANDARD) or frames.is_installed(filename):
            keeps = _is_shown(entry)
        if keeps:  # also of Python's library, if a shown frame calls it
            user_entries.append(entry)
    shortened = None
    for entry in reversed(user_entries):
        shortened = types.TracebackType(
            shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno
        )
    return shortened


def _entries(error: BaseException) -> list[types.TracebackType]:
    entries, entry = [], error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    return entries


def _is_shown(entry: types.TracebackType) -> bool:
    filename = entry.tb_frame.f_code.co_filename
    standard = filename.startswith(frames.STANDARD) and not frames.is_installed(
        filename
    )
    return not (frames.GENERATED in filename or standard or frames.is_inside(filename))
