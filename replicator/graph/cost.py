"""Where a communication is computed.

The one question today is which device adds up a matched set of tensors (the hub). The
constants and the choice between algorithms will live here too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

_UNKNOWN_BYTES = 1 << 10  # tensors of unknown size are mostly small: losses, counts


def tensor_bytes(tensor: tf.Tensor) -> int:
    """Returns the size of a tensor in bytes, or a guess where that is unknown."""
    if not tensor.shape.is_fully_defined() or not tensor.dtype.size:
        return _UNKNOWN_BYTES
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size


class Hubs:
    """Deals hubs to devices so that each one adds up about the same number of bytes."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._load = [0] * len(self._devices)

    def next(self, nbytes: int) -> str:
        """Returns the device with the least load so far and gives it `nbytes` more."""
        least = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[least] += nbytes + 1
        return self._devices[least]
