# SPDX-License-Identifier: Apache-2.0
"""Runs one batch: the model's own step on each replica, for its shard.

A batch is passed as the list of its tensors, with the structure that the model's step
expects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import context, errors
from replicator.inputs import shards
from replicator.keras import compiled, gathering, losses, metrics

_do_not_convert = tf.autograph.experimental.do_not_convert  # as Keras' own are not


class Tensors:
    """The structure of a batch, with its leaves that are not tensors.

    Args:
        batch: The argument of a model's step: a nest of tensors, arrays and None.
    """

    def __init__(self, batch: Any) -> None:
        batch = tf.nest.map_structure(_value, batch)
        self._leaves = tf.nest.flatten(batch)
        self._structure = batch

    @property
    def tensors(self) -> list[Any]:
        """The tensors of the batch, as a list."""
        return [leaf for leaf in self._leaves if leaf is not None]

    @property
    def key(self) -> str:
        """Equal for batches of the same structure."""
        return repr(self.forget()._structure)

    def packed(self, tensors: Sequence[Any]) -> Any:
        """Returns a batch of this structure with other tensors."""
        remaining = iter(tensors)
        filled = [None if leaf is None else next(remaining) for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, filled)

    def forget(self) -> Tensors:
        """Returns the structure without the tensors, to be kept."""
        copy = object.__new__(Tensors)
        copy._leaves = [None if leaf is None else 0 for leaf in self._leaves]
        copy._structure = tf.nest.pack_sequence_as(self._structure, copy._leaves)
        return copy


def _value(leaf: Any) -> Any:
    """Returns a leaf as a tensor, or None for None and Keras' placeholder for it."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        return leaf
    return tf.convert_to_tensor(leaf)


def train_or_test(
    repl: Any, model: Any, name: str, batch: Any, tensors: Sequence[Any], even: bool
) -> Any:
    """Builds a step of training or testing; returns the logs.

    Args:
        repl: The Replicator.
        model: The Keras model.
        name: The model's method, "train_step" or "test_step".
        batch: The structure of the global batch.
        tensors: Its tensors.
        even: Whether all shards are known to have the same number of examples.
    """

    def step_fn(shard: shards.Shard) -> Any:
        replica = context.require(name)
        data = batch.packed(shard.element)
        with (
            replica.weighing(None if even else shard),
            metrics.Exact(model, shard) as exact,
            losses.of_the_batch(model, shard, exact.note_new) as loss_calls,
            compiled.forward(model),
        ):
            logs = getattr(model, name)(data)
            if name == "train_step" and not loss_calls and replica.num_replicas > 1:
                _warn_of_own_loss(model)
            return _equal_logs(logs, exact.results, shard, name)

    return _run(repl, step_fn, tensors, _first)


def _warn_of_own_loss(model: Any) -> None:
    """Warns what is assumed of a loss that a model's train_step computes itself."""
    logging.log_first_n(
        logging.WARNING,
        "The train_step of %s computes its loss itself, on each replica for its shard, "
        "and the loss is assumed to be a mean over the examples. If it is not (but a "
        "sum, a mean over unmasked values, a comparison of examples), compute it in "
        "compute_loss, which is given the whole batch.",
        1,
        type(model).__name__,
    )


def predict(repl: Any, model: Any, batch: Any, tensors: Sequence[Any]) -> Any:
    """Builds a step of prediction; returns the outputs for the global batch, in order.

    Args:
        repl: The Replicator.
        model: The Keras model.
        batch: The structure of the global batch.
        tensors: Its tensors.
    """
    # If other processes have some of the outputs, they are gathered within the step.
    is_shared = repl._settings.peers is not None

    def step_fn(shard: shards.Shard) -> Any:
        with compiled.forward(model):
            outputs = model.predict_step(batch.packed(shard.element))
        return gathering.whole(outputs, shard) if is_shared else outputs

    combine = _first if is_shared else _joined
    return _run(repl, step_fn, tensors, combine)


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def _run(
    repl: Any,
    step_fn: Callable[..., Any],
    tensors: Sequence[Any],
    combine: Callable[[Sequence[Any]], Any],
) -> Any:
    """Runs a step on the shards of a batch, or builds it if a function is being traced.

    Args:
        repl: The Replicator.
        step_fn: Takes a replica's shard.
        tensors: The tensors of the global batch.
        combine: Combines the values of all replicas into one.

    Returns:
        The result of step_fn, with one value at each leaf.
    """
    with tf.device("CPU:0"):  # where batches are: each part moves once
        parts = shards.split(list(tensors), repl.num_replicas)
    structures: list[Any] = []

    def noting(shard: shards.Shard) -> Any:
        returned = step_fn(shard)
        structures.append(tf.nest.map_structure(lambda _: None, returned))
        return returned

    def input_fn(ctx: Any) -> Any:
        return parts[ctx.replica_id]

    # Leaf by leaf: all replicas' values of one, then those of the next.
    flat = tf.nest.flatten(repl.run(_do_not_convert(noting), input_fn))
    step = repl._settings.world.num_local
    leaves = [combine(flat[i : i + step]) for i in range(0, len(flat), step)]
    return tf.nest.pack_sequence_as(structures[-1], leaves)


def _equal_logs(logs: Any, equal: Sequence[Any], shard: shards.Shard, name: str) -> Any:
    """Returns a step's logs with equal values on all replicas.

    Args:
        logs: A nest of scalars, one per value for Keras to log.
        equal: Values that are already equal.
        shard: The replica's shard.
        name: The model's step, for messages.
    """
    equal_ids = {id(value) for value in equal}

    def equalized(leaf: Any) -> Any:
        if id(leaf) in equal_ids:
            return tf.convert_to_tensor(leaf)
        if leaf is None or isinstance(leaf, bool | int | float):
            return leaf
        value = tf.convert_to_tensor(leaf)
        if not value.dtype.is_floating:
            return value if context.require(name).num_replicas == 1 else _refuse(name)
        return metrics.mean(value, shard)

    return tf.nest.map_structure(equalized, logs)


def _refuse(name: str) -> Any:
    raise errors.ArgumentError(
        errors.compose(
            f"{name} returned an integer that each replica computed on its own.",
            fix="return the result of a metric, or a mean of floats over the examples.",
        )
    )


def _joined(parts: Sequence[Any]) -> Any:
    """Joins the outputs of all replicas into the batch's."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    if parts[0].shape.rank == 0:
        raise errors.ArgumentError(
            errors.compose(
                "predict_step returned a scalar, which cannot be joined with those of "
                "the other replicas.",
                fix="return one row per example.",
            )
        )
    return tf.concat(list(parts), 0)
