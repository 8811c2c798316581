# SPDX-License-Identifier: Apache-2.0
"""What has to be set before TensorFlow is imported. Importing this module sets it."""

from __future__ import annotations

import os
import pathlib
import signal
import sys

_EXAMPLES = pathlib.Path(__file__).resolve().parents[1]

# Fewer banners, and no kernels whose rounding differs from machine to machine.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")


def end_at_once() -> None:
    """Lets Ctrl-C end an example at once, as is best during its imports.

    Python would raise KeyboardInterrupt in the midst of them: it prints where in
    TensorFlow that was, and modules that catch everything swallow it. Programs that
    only import an example are left alone.
    """
    path = getattr(sys.modules["__main__"], "__file__", None)
    is_example = path is not None and pathlib.Path(path).resolve().parent == _EXAMPLES
    if is_example and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_again() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt again, after `end_at_once`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


end_at_once()
