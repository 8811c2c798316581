# SPDX-License-Identifier: Apache-2.0
"""Traces a step as any function is traced: as if users had put it in a tf.function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def trace(
    build: Callable[[], Any],
    order: Callable[[Sequence[tf.Operation], set[tf.Operation]], list[tf.Operation]],
    alone: bool = True,
) -> Any:
    """Traces a function without arguments; returns its ConcreteFunction.

    Args:
        build: Adds the ops; returns the results.
        order: Is not called: TensorFlow puts the effects in order, as in each function,
            and lets the results wait for them.
        alone: Whether it holds nothing but a step.
    """

    def step() -> Any:  # what errors call it
        if alone:
            _steps.add(tf.compat.v1.get_default_graph())
        return build()

    return tf.function(step, autograph=False).get_concrete_function()


_steps: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def is_step(graph: tf.Graph) -> bool:
    """Whether a graph is a function's that `trace` traces, with nothing but a step."""
    return graph in _steps


def leave_out_unused(graph: Any) -> None:
    """Does nothing: TensorFlow leaves out ops that nothing needs before they run."""
