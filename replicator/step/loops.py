# SPDX-License-Identifier: Apache-2.0
"""Runs several steps per call: a loop in the graph, around a step that is built once.

The step becomes a function whose replicas already communicate, and the loop calls it.
Its results are stacked. The overhead of a call (leaving Python, starting and ending on
all devices) is paid once rather than per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import choice, tapes
from replicator.graph.order import ordering
from replicator.step import outputs


def repeat(
    build: Callable[[], list[Any]], count: int, devices: Sequence[str]
) -> list[Any]:
    """Builds a loop of consecutive steps into the default graph.

    An iteration starts when the previous one is done on all devices: the inputs may
    end, and that must not stop a device in the middle of its updates.

    Args:
        build: Builds one step into the default graph; returns what step_fn returned for
            each replica.
        count: The number of steps.
        devices: Where each replica runs.

    Returns:
        What step_fn returned for each replica, stacked to [count, ...] at each leaf.

    Raises:
        ReplicatorError: The step returns a value that cannot be stacked.
    """
    structures: list[Any] = []

    def one_step() -> tuple[list[list[Any]], tf.Tensor]:
        returned = build()
        structures.append(tf.nest.map_structure(_check, returned[0]))
        rows = [
            outputs.returnable(tf.nest.flatten(replica_value))
            for replica_value in returned
        ]
        return rows, tf.constant(True)

    step = choice.trace(one_step, ordering.order_as_created)
    with tapes.stop_recording():  # like `outputs.seal`: no gradient passes
        specs, _ = step.structured_outputs
        arrays = [
            [_array(spec, count, device) for spec in row if spec is not None]
            for row, device in zip(specs, devices, strict=True)
        ]

        def iteration(number: tf.Tensor, arrays: Any) -> tuple[tf.Tensor, Any]:
            rows, completion = step()
            values = [[leaf for leaf in row if leaf is not None] for row in rows]
            arrays = [
                _with_row(replica_arrays, leaves, number, device)
                for replica_arrays, leaves, device in zip(
                    arrays, values, devices, strict=True
                )
            ]
            with tf.control_dependencies([completion.op]):
                return number + 1, arrays

        number, arrays = tf.while_loop(
            lambda number, _: number < count,
            iteration,
            (tf.constant(0), arrays),
            parallel_iterations=1,
        )
        stacked = [
            _stacks(row, replica_arrays, device)
            for row, replica_arrays, device in zip(specs, arrays, devices, strict=True)
        ]
    if not tf.compat.v1.get_default_graph().building_function:
        stacked = [[outputs.after(number.op, leaf) for leaf in row] for row in stacked]
    structure = structures[-1]
    return [tf.nest.pack_sequence_as(structure, row) for row in stacked]


def _array(spec: tf.TensorSpec, count: int, device: str) -> tf.TensorArray:
    with tf.device(device):
        return tf.TensorArray(spec.dtype, count, element_shape=spec.shape)


def _with_row(
    arrays: Sequence[tf.TensorArray],
    leaves: Sequence[tf.Tensor],
    number: tf.Tensor,
    device: str,
) -> list[tf.TensorArray]:
    with tf.device(device):
        pairs = zip(arrays, leaves, strict=True)
        return [array.write(number, leaf) for array, leaf in pairs]


def _stacks(
    specs: Sequence[Any], arrays: Sequence[tf.TensorArray], device: str
) -> list[Any]:
    """Returns the stacked leaves of one replica, with None where there is no value."""
    remaining = iter(arrays)
    with tf.device(device):
        return [
            None if spec is None else tf.stop_gradient(next(remaining).stack())
            for spec in specs
        ]


def _check(leaf: Any) -> None:
    """Raises ReplicatorError unless a leaf can be stacked; maps it to None."""
    plain = leaf is None or isinstance(leaf, tf.Operation | tf.Tensor)
    dtype = getattr(leaf, "dtype", None)
    if plain and dtype not in (tf.resource, tf.variant):
        return
    kind = f"a tensor of {dtype!r}" if plain else type(leaf).__name__
    raise errors.ReplicatorError(
        f"step_fn returned {kind}; those of several steps cannot be stacked.",
        fix="with steps_per_call, return tensors of one shape in all steps, or None; "
        "make sparse and ragged ones dense.",
    )
