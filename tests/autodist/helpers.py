# SPDX-License-Identifier: Apache-2.0
"""Runs single-device programs: on one device with plain TensorFlow, and on many."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests.autodist import programs

v1 = tf.compat.v1


def make(num_replicas: int, strategy: Any = None, **options: Any) -> Any:
    """Returns an AutoDist on the first `num_replicas` logical CPUs."""
    devices = [f"CPU:{r}" for r in range(num_replicas)]
    return replicator.AutoDist(devices, strategy, **options)


def run(
    program: Callable[[int], programs.Built],
    num_replicas: int | None,
    strategy: Any = None,
    sizes: Sequence[int] = programs.SIZES,
    batch: int = 12,
) -> Any:
    """Returns the fetches of all steps, and the final variables.

    Args:
        program: Builds the program, given the batch size of its iterator.
        num_replicas: The number of replicas; None: plain TensorFlow on one device.
        strategy: As for AutoDist.
        sizes: The number of examples fed in each step.
        batch: The global batch size.
    """
    autodist = None if num_replicas is None else make(num_replicas, strategy)
    with tf.Graph().as_default() as graph, contextlib.ExitStack() as stack:
        if autodist is not None:
            stack.enter_context(autodist.scope())
        v1.set_random_seed(1)
        built = program(batch // (num_replicas or 1))
        if autodist is not None:
            session = autodist.create_distributed_session()
        else:
            session = v1.Session()
            session.run(v1.global_variables_initializer())
            session.run(graph.get_collection(v1.GraphKeys.TABLE_INITIALIZERS))
        steps = sizes if built.feeds else sizes[:3]
        values = [
            session.run(built.fetches, built.feeds(n) if built.feeds else None)
            for n in steps
        ]
        return values, session.run(built.variables)


def assert_equal(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Raises unless two nests hold the same, up to a tolerance."""
    tf.nest.assert_same_structure(actual, expected)
    for a, b in zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True):
        if b is None:
            assert a is None
            continue
        assert np.shape(a) == np.shape(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
