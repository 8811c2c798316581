# SPDX-License-Identifier: Apache-2.0
"""Traces a step like any function that a user puts into a tf.function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def trace(
    build: Callable[[], Any],
    order: Callable[[Sequence[tf.Operation], set[tf.Operation]], list[tf.Operation]],
    only_step: bool = True,
) -> Any:
    """Traces a function without arguments; returns its ConcreteFunction.

    Args:
        build: Adds the ops; returns the results.
        order: Not called: TensorFlow orders the effects, as in any function, and makes
            the results wait for them.
        only_step: Whether the function contains nothing but a step.
    """

    def step() -> Any:  # its name appears in errors
        if only_step:
            _steps.add(tf.compat.v1.get_default_graph())
        return build()

    return tf.function(step, autograph=False).get_concrete_function()


_steps: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def is_step(graph: tf.Graph) -> bool:
    """Whether a graph was traced by `trace`, with nothing but a step in it."""
    return graph in _steps
