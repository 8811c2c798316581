# SPDX-License-Identifier: Apache-2.0
"""`pytest --gpus`: the tests' CPU:k are logical GPUs, whatever GPUs there are.

For `make gpu-check`. Each GPU is split into as many logical ones as it takes.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from replicator import devices

_MEMORY = 2048  # MiB of each logical GPU


def split(count: int) -> None:
    """Makes logical GPUs, before TensorFlow starts; the tests' devices are these.

    Args:
        count: How many at least.

    Raises:
        RuntimeError: There is no GPU.
    """
    found = tf.config.list_physical_devices("GPU")
    if not found:
        raise RuntimeError("--gpus: this machine has no GPU that TensorFlow can use")
    each = math.ceil(count / len(found))
    for gpu in found:
        tf.config.set_logical_device_configuration(
            gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=_MEMORY)] * each
        )
    local = devices.resolve
    devices.resolve = lambda names: local(mapped(names, count))


def mapped(names: Any, count: int) -> Any:
    """Returns names of devices with GPU:k in place of CPU:k.

    Args:
        names: A name, or a list of names or of lists of them; None is left as it is.
        count: How many logical GPUs there are.
    """
    if isinstance(names, list | tuple):
        return [mapped(name, count) for name in names]
    k = names.removeprefix("CPU:") if isinstance(names, str) else ""
    if k == names or not k.isdecimal() or int(k) >= count:
        return names
    return f"GPU:{k}"
