# SPDX-License-Identifier: Apache-2.0
"""Makes metrics count the examples of all replicas, as on one device.

A Keras metric's state is read as the sum over the replicas. For Keras' own metrics,
whose states are sums over examples, each replica adds its shard. Metrics that weigh
batches equally take the shard's share as its weight; any other metric is updated on one
replica, from the gathered arguments. Results are computed from the sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.inputs.shards import Shard
from replicator.keras import gathering, hooks, losses, parts
from replicator.primitives import all_reduce
from replicator.step import objects
from replicator.variables.replicated import ReplicatedVariable, plain

# Keras metrics whose axis may be the batch's, or whose function may be anything.
_ACROSS = (
    "PearsonCorrelation",
    "ConcordanceCorrelation",
    "CosineSimilarity",
    "MeanMetricWrapper",
)
# Keras metrics that are means of a function with a value per element.
_BY_ELEMENT = ("Accuracy", "BinaryAccuracy")


class Exact:
    """Hooks into the metrics of a model while its step is built for one replica.

    Args:
        model: The Keras model.
        shard: The replica's shard.

    Attributes:
        results: The results that the metrics returned, which are equal on all replicas.
    """

    def __init__(self, model: Any, shard: Shard) -> None:
        self._model, self._shard = model, shard
        self._inside = False  # inside a metric, which may call others
        self._known: set[int] = set()
        self._stack = contextlib.ExitStack()
        self.results: list[Any] = []

    def __enter__(self) -> Exact:
        self.note_new()
        return self

    def __exit__(self, *about: Any) -> None:
        self._stack.close()

    def note_new(self) -> None:
        """Hooks into metrics that the model has gained."""
        for metric in _all_metrics(self._model):
            if id(metric) not in self._known:
                self._known.add(id(metric))
                self._take_charge(metric)

    def _take_charge(self, metric: Any) -> None:
        update, result = metric.update_state, metric.result
        if _is_list(metric):
            self._replace(metric, "update_state", self._list_update(metric, update))
            return
        kind = _kind(metric)

        def update_state(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return update(*args, **kwargs)
            with self._inside_one():
                if kind == "mean":
                    return self._update_mean(update, *args, **kwargs)
                if kind == "sum":
                    return self._update_sum(update, *args, **kwargs)
                if kind == "sums" and not _crosses(metric, *args, **kwargs):
                    return update(*args, **kwargs)
                return self._update_whole(metric, update, args, kwargs)

        def all_results() -> Any:
            if self._inside:
                return result()
            with self._inside_one():
                returned = metric.stateless_result(_totals(metric))
            self.results += tf.nest.flatten(returned)
            return returned

        self._replace(metric, "update_state", update_state)
        self._replace(metric, "result", all_results)

    def _list_update(self, metric: Any, update: Any) -> Any:
        """Returns the update of Keras' list of the metrics given to `compile`."""

        def update_state(y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
            if not metric.built:  # creates its metrics before their first update
                metric.build(y_true, y_pred)
                self.note_new()
            return update(y_true, y_pred, *args, **kwargs)

        return update_state

    def _update_mean(self, update: Any, values: Any, sample_weight: Any = None) -> Any:
        """Updates a keras.metrics.Mean; a per-batch value has a total weight of 1."""
        weight = 1 if sample_weight is None else sample_weight
        shape = tf.convert_to_tensor(values).shape
        if isinstance(weight, int | float) and not self._has_examples(shape):
            sample_weight = tf.fill(shape[:1], self._shard.share * weight)
        return update(values, sample_weight=sample_weight)

    def _update_sum(self, update: Any, values: Any, sample_weight: Any = None) -> Any:
        """Updates a keras.metrics.Sum; a Python number belongs to the whole batch."""
        if isinstance(values, int | float) and sample_weight is None:
            sample_weight = self._shard.share
        return update(values, sample_weight=sample_weight)

    def _has_examples(self, shape: tf.TensorShape) -> bool:
        """Whether the first axis of a value is the examples' axis.

        If only one of the two sizes is static, it is not. A multiple of the number of
        examples may come from folding another axis into theirs.
        """
        if shape.rank is None or shape.rank == 0:
            return shape.rank is None
        rows, count = shape[0], tf.get_static_value(self._shard.count)
        if rows is None or count is None:
            return rows is None
        pairs = [(rows, int(count))]
        replicas = context.require("a metric").num_replicas
        if int(tf.get_static_value(self._shard.total)) % replicas:  # else all are alike
            pairs = objects.all_gather_object(pairs[0])
        largest = max(count for _, count in pairs)
        times = max(rows for rows, _ in pairs) // max(largest, 1)
        return all(rows == times * count for rows, count in pairs)

    def _update_whole(self, metric: Any, update: Any, args: Any, kwargs: Any) -> None:
        """Updates any metric from the gathered arguments of all replicas.

        Runs on one replica if its state is read as a sum, else equally on all.
        """
        replica = context.require("a metric")
        replica.build.refuse_copies(f"the metric {type(metric).__name__}")
        arguments = tf.nest.map_structure(self._mean_of_scalar, (args, kwargs))
        args, kwargs = gathering.whole(arguments, self._shard)
        if _adds_up(metric) and replica.replica_id > 0:
            return
        with replica.computing_whole():
            update(*args, **kwargs)

    def _mean_of_scalar(self, leaf: Any) -> Any:
        if not tf.is_tensor(leaf) or leaf.shape.rank != 0:
            return leaf
        if not leaf.dtype.is_floating:
            raise errors.ArgumentError(
                errors.compose(
                    f"a metric was given a scalar of {leaf.dtype.name} on each "
                    "replica, which may be a count, to be summed, or a number of all.",
                    [f"at {errors.user_line()}"],
                    "pass tensors with an axis of examples, or a floating-point mean "
                    "over them.",
                )
            )
        return mean(leaf, self._shard)

    def _replace(self, metric: Any, name: str, method: Any) -> None:
        self._stack.enter_context(hooks.replaced(metric, name, method))

    @contextlib.contextmanager
    def _inside_one(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False


def mean(value: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Returns the mean of a value over the replicas, weighted by their examples."""
    return all_reduce.all_reduce(value, "mean", weight=shard.count)


def _all_metrics(model: Any) -> list[Any]:
    """Returns a model's metrics, with each of those given to `compile`."""
    all_metrics: list[Any] = []
    for metric in parts.metrics(model):
        all_metrics.append(metric)
        if _is_list(metric):
            all_metrics += metric.metrics
    return all_metrics


def _is_list(metric: Any) -> bool:
    """Whether a metric is Keras' list of those given to `compile`."""
    import keras

    is_hidden = not hasattr(keras.metrics, type(metric).__name__)
    has_list = isinstance(getattr(metric, "metrics", None), list)
    return is_hidden and has_list and _of_keras(type(metric))


def _kind(metric: Any) -> str:
    """Returns how a metric is updated.

    "mean" and "sum" may take per-batch numbers; "sums" are sums over examples; "any" is
    the rest.
    """
    import keras

    kind = type(metric)
    if kind in (keras.metrics.Mean, keras.metrics.Sum):
        return kind.__name__.lower()
    is_keras_metric = _of_keras(kind) and hasattr(keras.metrics, kind.__name__)
    return "sums" if is_keras_metric and kind.__name__ not in _ACROSS else "any"


def _crosses(metric: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether one of Keras' own metrics compares examples with one another.

    Most of those that are means of a function reduce the last axis. That of outputs
    of rank 1 is the examples', so that one value for all of them is added.
    """
    import keras

    if not isinstance(metric, keras.metrics.MeanMetricWrapper):
        return False
    if type(metric).__name__ in _BY_ELEMENT:
        return False
    outputs = [*args[1:2], kwargs.get("y_pred")]
    return any(map(losses.lacks_features, outputs))


def _of_keras(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "keras"


def _adds_up(metric: Any) -> bool:
    """Whether all of a metric's state is read as the sum over the replicas.

    Raises:
        ArgumentError: Only some of it is.
    """
    answers = {_placement(v).adds_up for v in metric.variables if _placement(v)}
    if len(answers) > 1:
        raise errors.ArgumentError(
            errors.compose(
                f"the metric {type(metric).__name__} has variables that are summed "
                "over the replicas, and others that are not.",
                [f"at {errors.user_line()}"],
                'create all with add_weight, or with add_variable(aggregation="sum").',
            )
        )
    return True in answers or not answers


def _totals(metric: Any) -> list[Any]:
    """Returns the values of a metric's variables as read outside a step."""
    totals = []
    for variable in metric.variables:
        placement = _placement(variable)
        value = tf.convert_to_tensor(variable.value)
        if placement is not None and placement.is_aggregated:
            value = all_reduce.all_reduce(value, "sum" if placement.adds_up else "mean")
        totals.append(value)
    return totals


def _placement(variable: Any) -> Any:
    replicated = plain(variable)
    return replicated.placement if isinstance(replicated, ReplicatedVariable) else None
