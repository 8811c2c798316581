# SPDX-License-Identifier: Apache-2.0
"""Leaves the capture of resources to the function graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def capture_all(graph: Any, handles: Sequence[tuple[tf.Tensor, str]]) -> None:
    """Does nothing: the graph captures each resource on its first use."""
