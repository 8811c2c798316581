# SPDX-License-Identifier: Apache-2.0
"""Makes losses those of the whole batch, however it is split.

The mean of a loss over each shard's examples, weighted by their number, is its mean
over the batch, which most losses are. Any other is computed on every replica from the
outputs of all: one that is summed, divides by the unmasked elements, or compares
examples with one another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replicator.inputs.shards import Shard
from replicator.keras import gathering, hooks

_MEANS = ("sum_over_batch_size", "mean")
# Keras losses with a value per example, or per element of one.
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
_CHOSEN_LATER = ("crossentropy", "ce")  # resolved by shape to one of the above


@contextlib.contextmanager
def of_the_batch(
    model: Any, shard: Shard, note_metrics: Callable[[], None]
) -> Iterator[list[bool]]:
    """Makes `model.compute_loss` compute the whole batch's loss in this block.

    Args:
        model: A Keras model whose step is being built for a replica.
        shard: The replica's shard.
        note_metrics: Called when new metrics may exist.

    Yields:
        A list with an entry for each call of compute_loss.
    """
    original = model.compute_loss
    loss_calls: list[bool] = []

    def gathering_loss(*args: Any, **kwargs: Any) -> Any:
        loss_calls.append(True)
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
        loss_calls.append(True)
        arguments = (x, y, y_pred, sample_weight)
        if len(tf.nest.flatten(y_pred)) > 1:
            # Metrics for several losses are created by the first call. Make that a
            # trace whose results are discarded.
            tf.function(
                _do_not_convert(lambda: original(*arguments, *args, **kwargs))
            ).get_concrete_function()
            note_metrics()
        if not is_mean_over_examples(model, y_pred):  # `x` is not used
            y = gathering.whole(y, shard)
            y_pred = gathering.whole(y_pred, shard)
            sample_weight = gathering.whole(sample_weight, shard)
        return original(x, y, y_pred, sample_weight, *args, **kwargs)

    replacement = compute_loss if _is_default(model) else gathering_loss
    with hooks.replaced(model, "compute_loss", replacement):
        yield loss_calls


def is_mean_over_examples(model: Any, y_pred: Any) -> bool:
    """Whether the example-weighted mean of the shards' losses is the batch's loss.

    Args:
        model: A compiled Keras model.
        y_pred: Its outputs, which may have masks.
    """
    outputs = tf.nest.flatten(y_pred)
    if any(gathering.mask_of(output) is not None for output in outputs):
        return False
    if any(map(lacks_features, outputs)):
        return False
    losses = tf.nest.flatten(getattr(model, "loss", None))
    return all(map(is_per_example, losses))


def lacks_features(output: Any) -> bool:
    """Whether an output's last axis, which Keras reduces, is that of the examples.

    Args:
        output: An output of a model, such as one that squeezed the axis of size 1.
    """
    return tf.is_tensor(output) and output.shape.rank == 1


def is_per_example(loss: Any) -> bool:
    """Whether a loss or metric function is a mean of one value per example.

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
        # An axis other than the last may be the batch's; and ignored classes are left
        # out of the mean. A CosineSimilarity does not expose its axis.
        is_mean = config.get("axis", -1) == -1 and config.get("ignore_class") is None
        return is_mean and type(loss) is not keras.losses.CosineSimilarity
    return any(loss is function for function in _functions(keras))


def _functions(keras: Any) -> list[Callable[..., Any]]:
    return [getattr(keras.losses, name) for name in _PER_EXAMPLE]


def _is_default(model: Any) -> bool:
    """Whether a model computes Keras' own loss, the one given to `compile`."""
    import keras

    # `model.loss` is a Keras method unless `compile` was given a loss.
    return type(model).compute_loss is keras.Model.compute_loss
