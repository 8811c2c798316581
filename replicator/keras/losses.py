# SPDX-License-Identifier: Apache-2.0
"""Losses that are those of the whole batch, however it is split.

The mean of a loss over the examples of each shard, weighed by how many these are, is
its mean over the batch; that is what most losses are. Any other is computed from the
outputs of all replicas, on each of them: one that is summed, divides by what is not
masked, or compares examples with one another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replicator.inputs.shards import Shard
from replicator.keras import gathering, hooks

_MEANS = ("sum_over_batch_size", "mean")
# Losses of Keras that are a value per example, or per element of one.
_PER_EXAMPLE = {
    "mean_squared_error": "MeanSquaredError",
    "mean_absolute_error": "MeanAbsoluteError",
    "mean_absolute_percentage_error": "MeanAbsolutePercentageError",
    "mean_squared_logarithmic_error": "MeanSquaredLogarithmicError",
    "cosine_similarity": "CosineSimilarity",
    "huber": "Huber",
    "log_cosh": "LogCosh",
    "kl_divergence": "KLDivergence",
    "poisson": "Poisson",
    "hinge": "Hinge",
    "squared_hinge": "SquaredHinge",
    "categorical_hinge": "CategoricalHinge",
    "binary_crossentropy": "BinaryCrossentropy",
    "binary_focal_crossentropy": "BinaryFocalCrossentropy",
    "categorical_crossentropy": "CategoricalCrossentropy",
    "categorical_focal_crossentropy": "CategoricalFocalCrossentropy",
    "sparse_categorical_crossentropy": "SparseCategoricalCrossentropy",
}
_do_not_convert = tf.autograph.experimental.do_not_convert
_CHOSEN_LATER = ("crossentropy", "ce")  # by the shapes, among those above


@contextlib.contextmanager
def of_the_batch(
    model: Any, shard: Shard, note_metrics: Callable[[], None]
) -> Iterator[list[bool]]:
    """In this block, `model.compute_loss` is about the whole batch.

    Args:
        model: A Keras model, whose step is being built for a replica.
        shard: What the replica was dealt.
        note_metrics: Called when metrics may have been made.

    Yields:
        A list that has an entry for each time it was called.
    """
    original = model.compute_loss
    asked: list[bool] = []

    def own(*args: Any, **kwargs: Any) -> Any:
        asked.append(True)
        args, kwargs = gathering.whole((args, kwargs), shard)
        return original(*args, **kwargs)

    def compute_loss(
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        asked.append(True)
        given = (x, y, y_pred, sample_weight)
        if len(tf.nest.flatten(y_pred)) > 1:
            # Several losses are counted by metrics that are made by their first call.
            # Let that be one that nothing comes of, but for them.
            tf.function(
                _do_not_convert(lambda: original(*given, *args, **kwargs))
            ).get_concrete_function()
            note_metrics()
        if not is_mean_over_examples(model, y_pred):  # `x` is not used
            y = gathering.whole(y, shard)
            y_pred = gathering.whole(y_pred, shard)
            sample_weight = gathering.whole(sample_weight, shard)
        return original(x, y, y_pred, sample_weight, *args, **kwargs)

    whole = compute_loss if _is_default(model) else own
    with hooks.replaced(model, "compute_loss", whole):
        yield asked


def is_mean_over_examples(model: Any, y_pred: Any) -> bool:
    """Whether weighing the losses of the shards by their examples gives the batch's.

    Args:
        model: A compiled Keras model.
        y_pred: Its outputs, for which there may be masks.
    """
    outputs = tf.nest.flatten(y_pred)
    if any(gathering.mask_of(output) is not None for output in outputs):
        return False
    losses = tf.nest.flatten(getattr(model, "loss", None))
    return all(map(is_per_example, losses))


def is_per_example(loss: Any) -> bool:
    """Whether a loss or metric function is a mean of values that examples have.

    Args:
        loss: As for Keras' `compile`: its name, a function, a keras.losses.Loss, or
            None.
    """
    import keras

    if loss is None:
        return True
    if isinstance(loss, str):
        if loss.lower() in _CHOSEN_LATER:
            return True
        loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.Loss):
        classes = [getattr(keras.losses, name) for name in _PER_EXAMPLE.values()]
        if type(loss) not in classes or loss.reduction not in _MEANS:
            return False
        config = loss.get_config()
        # Along another axis than the last, it may be that of the batch; and what is
        # ignored counts in no mean. A CosineSimilarity does not say which axis it has.
        along = config.get("axis", -1) == -1 and config.get("ignore_class") is None
        return along and type(loss) is not keras.losses.CosineSimilarity
    return any(loss is function for function in _functions(keras))


def _functions(keras: Any) -> list[Callable[..., Any]]:
    return [getattr(keras.losses, name) for name in _PER_EXAMPLE]


def _is_default(model: Any) -> bool:
    """Whether a model computes its loss as Keras does, of what `compile` was given."""
    import keras

    # `model.loss` is a method of Keras' unless `compile` was given one.
    return type(model).compute_loss is keras.Model.compute_loss
