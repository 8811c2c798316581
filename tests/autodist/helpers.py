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


def in_sessions(
    program: Callable[[Callable[..., Any]], Any],
    *num_replicas: int,
    strategy: Any = "mirrored",
    tolerance: float = 1e-5,
    **options: Any,
) -> Any:
    """Returns what a program gives on one device; raises unless replicas give it, too.

    Args:
        program: Builds a graph, and runs it. It is given a function that returns a
            session in which variables have values, and tables begin.
        *num_replicas: The numbers of replicas; without any, 1, 2 and 3.
        strategy: As for AutoDist.
        tolerance: By how much they may differ.
        **options: Further options of AutoDist.
    """
    with tf.Graph().as_default():
        expected = program(plain_session)
    for count in num_replicas or (1, 2, 3):
        autodist = make(count, strategy, **options)
        with tf.Graph().as_default(), autodist.scope():
            assert_equal(
                program(autodist.create_distributed_session), expected, tolerance
            )
    return expected


def plain_session(**_: Any) -> v1.Session:
    """Returns a session of plain TensorFlow whose variables have values."""
    session = v1.Session()
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    session.run(v1.tables_initializer())
    return session


def run(
    program: Callable[[int], programs.Built],
    num_replicas: int | None,
    strategy: Any = None,
    sizes: Sequence[int] = programs.SIZES,
    batch: int = 12,
) -> Any:
    """Returns the fetches of all steps, and the final variables.

    Args:
        program: Builds the program, given a batch size.
        num_replicas: The number of replicas; None: plain TensorFlow on one device.
        strategy: As for AutoDist.
        sizes: The number of examples fed in each step.
        batch: The batch size of its iterator.
    """
    autodist = None if num_replicas is None else make(num_replicas, strategy)
    with tf.Graph().as_default(), contextlib.ExitStack() as stack:
        if autodist is not None:
            stack.enter_context(autodist.scope())
        v1.set_random_seed(1)
        built = program(batch)
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
