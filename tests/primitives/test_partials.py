# SPDX-License-Identifier: Apache-2.0
"""Reductions that other processes take part in; test_levels.py has those of hosts."""

from __future__ import annotations

import types
from typing import Any

import pytest
import tensorflow as tf

from replicator.primitives import partials


@pytest.mark.parametrize(("op", "expected"), [("sum", 13.0), ("mean", 3.25)])
def test_replicas_of_all_processes_count(op: str, expected: float) -> None:
    """Two of four replicas, of which the others add up to 10, are in this process."""
    device = "/job:localhost/replica:0/task:0/device:CPU:0"
    matched: Any = types.SimpleNamespace(
        calls=[types.SimpleNamespace(group=(0, 1, 2, 3))],
        crossing=types.SimpleNamespace(reduce=lambda local: local + 10.0),
        devices=[device, device],
        hub=lambda nbytes, owner: device,
        notes=types.SimpleNamespace(algorithms=[]),
        options={"op": op},
    )
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        column = [tf.constant(1.0), tf.constant(2.0)]
        received = partials.across(matched, column, None, None)
        assert session.run(received) == [[expected]] * 2
