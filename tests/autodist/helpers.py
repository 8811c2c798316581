# SPDX-License-Identifier: Apache-2.0
"""Runs single-device programs: on one device with plain TensorFlow, and on many."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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


@contextlib.contextmanager
def scope(num_replicas: int = 3, strategy: Any = "mirrored") -> Iterator[Any]:
    """Yields an AutoDist whose scope, in a tf.Graph, the block runs in."""
    autodist = make(num_replicas, strategy)
    with tf.Graph().as_default(), autodist.scope():
        yield autodist


def plain_session(**_: Any) -> v1.Session:
    """Returns a session of plain TensorFlow whose variables have values."""
    session = v1.Session()
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    session.run(v1.tables_initializer())
    return session


def run(
    program: Callable[[], programs.Built],
    num_replicas: int | None,
    strategy: Any = None,
    sizes: Sequence[int] = programs.SIZES,
) -> Any:
    """Returns the fetches of all steps, and the final variables.

    Args:
        program: Builds the program.
        num_replicas: The number of replicas; None: plain TensorFlow on one device.
        strategy: As for AutoDist.
        sizes: The number of examples fed in each step.
    """
    autodist = None if num_replicas is None else make(num_replicas, strategy)
    with tf.Graph().as_default(), contextlib.ExitStack() as stack:
        if autodist is not None:
            stack.enter_context(autodist.scope())
        v1.set_random_seed(1)
        built = program()
        begin = autodist.create_distributed_session if autodist else plain_session
        session = begin()
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
        if np.asarray(b).dtype.kind in "OSU":  # texts
            assert np.array_equal(a, b)
            continue
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
