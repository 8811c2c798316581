# SPDX-License-Identifier: Apache-2.0
"""`pytest --gpus`: the tests' CPU:k are logical GPUs of any physical GPUs.

For `make gpu-check`. Each GPU is split into as many logical ones as necessary. Tests
that cannot pass, as they expect CPUs or what TensorFlow does on CPUs only, are in
tests/not_on_gpus.txt, with the reason.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import tensorflow as tf

from replicator import devices
from tests import listed

LIST = pathlib.Path(__file__).with_name("not_on_gpus.txt")
_CRASH = "TensorFlow crashes"  # how the reason begins for tests that are not run

_MEMORY = 512  # MiB per logical GPU, so that a small GPU holds all of them


def split(count: int) -> None:
    """Makes the logical GPUs that replace the tests' devices, before TensorFlow starts.

    Args:
        count: The minimum number.

    Raises:
        RuntimeError: There is no GPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise RuntimeError("--gpus: this machine has no GPU that TensorFlow can use")
    # The laws compare with what NumPy and the CPU compute; the default has 10 bits.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    # For sessions, as docs/guides/sessions.md says: eager calls have it anyway.
    tf.config.set_soft_device_placement(True)
    per_gpu = math.ceil(count / len(gpus))
    for gpu in gpus:
        tf.config.set_logical_device_configuration(
            gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=_MEMORY)] * per_gpu
        )
    local = devices.resolve
    devices.resolve = lambda names: local(mapped(names, count))


def mapped(names: Any, count: int) -> Any:
    """Returns device names with GPU:k in place of CPU:k.

    Args:
        names: A name, or a list of names or of lists of them; None stays None.
        count: The number of logical GPUs.
    """
    if isinstance(names, list | tuple):
        return [mapped(name, count) for name in names]
    kind, _, k = names.partition(":") if isinstance(names, str) else ("", "", "")
    if kind.upper() != "CPU" or not k.isdecimal() or int(k) >= count:
        return names
    return f"GPU:{k}"


def mark(items: Sequence[pytest.Item]) -> None:
    """Marks the listed tests. GPUs differ, so that some may pass on another one."""
    listed.mark(
        items,
        LIST,
        lambda why: pytest.mark.xfail(reason=why, run=not why.startswith(_CRASH)),
    )
