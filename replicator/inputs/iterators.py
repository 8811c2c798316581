# SPDX-License-Identifier: Apache-2.0
"""Creates and restarts the iterators of a step's datasets, with prefetching."""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from replicator.inputs import places

_PREFETCH = 2  # steps ready in memory, as in tf.distribute's own inputs


def prefetched(
    dataset: tf.data.Dataset,
    device: str | None,
    per_step: int,
    home: str | None = None,
) -> tf.data.Dataset:
    """Prefetches elements, to the replica's device unless it is a CPU.

    Args:
        dataset: The dataset.
        device: The replica's device; None: the dataset feeds several replicas.
        per_step: The number of elements that a step takes.
        home: The CPU of the dataset's host; None: in this process.
    """
    if device is None or tf.DeviceSpec.from_string(device).device_type == "CPU":
        return dataset.prefetch(_PREFETCH * per_step)
    if home is not None:
        to_device = tf.data.experimental.copy_to_device(device, source_device=home)
        return dataset.apply(to_device).prefetch(_PREFETCH)
    if not places.is_here(device):  # on another host: the step copies it there
        return dataset.prefetch(_PREFETCH)
    return dataset.apply(tf.data.experimental.prefetch_to_device(device, _PREFETCH))


def without_autotuner(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Switches tf.data's autotuner off, unless the user has set it.

    TensorFlow 2.21 sometimes misses the end of an autotuner's thread and waits, holding
    Python's lock, until the thread wakes up by itself: up to a minute for each iterator
    that is freed or restarted. Settings of AUTOTUNE use all cores instead.
    """
    with warnings.catch_warnings():
        # In a tf.Graph TensorFlow warns that options may be unknown. Those of a loaded
        # dataset are, but ours still apply to it.
        warnings.simplefilter("ignore")
        autotune = dataset.options().autotune.enabled
    if autotune is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def make(dataset: tf.data.Dataset) -> Any:
    """Returns an iterator that `restart` or its initializer can restart."""
    if tf.executing_eagerly():
        return iter(dataset)
    iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
    # A MonitoredSession runs the table initializers, so it needs nothing more.
    tf.compat.v1.add_to_collection(
        tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer
    )
    return iterator


def restart(dataset: tf.data.Dataset, iterator: Any) -> None:
    """Restarts an eager iterator that a traced step has captured."""
    (resource,) = tf.nest.flatten(iterator, expand_composites=True)
    variant = tf.data.experimental.to_variant(dataset)
    tf.raw_ops.MakeIterator(dataset=variant, iterator=resource)
