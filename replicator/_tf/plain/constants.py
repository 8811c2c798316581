"""Leaves constants where they are put."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf


@contextlib.contextmanager
def replacing_constants(
    is_meant: Callable[[tf.Tensor], bool],
    replacement: Callable[[np.ndarray], tf.Tensor | None],
) -> Iterator[None]:
    """Does nothing: each graph holds the constants that are put into it."""
    yield
