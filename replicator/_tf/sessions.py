# SPDX-License-Identifier: Apache-2.0
"""Runs of sessions of TensorFlow 1 that leave the graph alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2 as _config
from tensorflow.python.framework import indexed_slices as _slices

# tf.compat.v1 lacks it, though its sessions return it.
IndexedSlicesValue = _slices.IndexedSlicesValue


def session_callable(
    session: tf.compat.v1.Session,
    fetches: Sequence[tf.Tensor],
    targets: Sequence[tf.Operation],
    feeds: Sequence[tf.Tensor],
    options: tf.compat.v1.RunOptions | None = None,
) -> Callable[..., list[Any]]:
    """Returns a function of the fed values that runs a session.

    The public `Session.run`, and what `make_callable` returns where something is fed,
    give the runtime all of the graph before each run: what another thread is building,
    too. This one does so once, when it is created.

    Args:
        session: The session.
        fetches: The tensors whose values are returned.
        targets: Ops that run, too.
        feeds: What is fed.
        options: As for `Session.run`.
    """
    callable_options = _config.CallableOptions(
        feed=[t.name for t in feeds],
        fetch=[t.name for t in fetches],
        target=[op.name for op in targets],
    )
    if options is not None:
        callable_options.run_options.CopyFrom(options)
    run: Callable[..., list[Any]] = session._make_callable_from_options(
        callable_options
    )
    return run


def leave_session(session: tf.compat.v1.Session) -> None:
    """Abandons a session without closing it, now or when it is freed.

    The public `close` waits until lost hosts are back, for however long.
    """
    session._closed = True
