# SPDX-License-Identifier: Apache-2.0
"""Ends a server together with the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def is_piped() -> bool:
    """Whether a program holds the other end of standard input."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def follow_parent() -> None:
    """Makes this process die with its parent, but not with its terminal.

    Linux sends the signal when the thread that started this process ends. On other
    systems, only the closing of standard input ends the process.
    """
    with contextlib.suppress(OSError):  # it leads a session already
        os.setsid()
    if sys.platform != "linux":
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)  # the parent died before the call


def wait_for_end() -> None:
    """Waits until standard input closes."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
