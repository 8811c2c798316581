# SPDX-License-Identifier: Apache-2.0
"""Finds the parts of a model by its attributes, including containers and layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_CONTAINERS = (list, tuple, set, dict)


def inside(model: Any) -> Iterator[Any]:
    """Yields a model and the layers and metrics inside of it, each once.

    Keras lists metrics by a property that models override. Those of models inside of it
    are not yielded: these may be models of another program.

    Args:
        model: A Keras model.
    """
    import keras

    kinds = (keras.layers.Layer, keras.metrics.Metric)
    seen: set[int] = set()
    remaining = [model]
    while remaining:
        part = remaining.pop()
        if id(part) in seen or (isinstance(part, keras.Model) and part is not model):
            continue
        seen.add(id(part))
        if isinstance(part, kinds):
            yield part
            remaining += [v for v in vars(part).values() if _leads_on(v, kinds)]
        else:
            values = part.values() if isinstance(part, dict) else part
            remaining += [v for v in values if _leads_on(v, kinds)]


def _leads_on(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, (*kinds, *_CONTAINERS))


def metrics(model: Any) -> list[Any]:
    """Returns the metrics of a model, whether it lists them or not."""
    import keras

    def is_public(metric: Any) -> bool:
        """Whether a metric is not one of Keras' internal lists of metrics."""
        kind = type(metric)
        is_keras = kind.__module__.partition(".")[0] == "keras"
        return not is_keras or hasattr(keras.metrics, kind.__name__)

    nested = [part for part in inside(model) if isinstance(part, keras.metrics.Metric)]
    return [*model.metrics, *filter(is_public, nested)]


def places(model: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields each attribute of a model, and each entry of those that are containers.

    Args:
        model: A Keras model.

    Yields:
        (container, key, value): `vars(model)`, or a list or a dict.
    """
    for name, value in list(vars(model).items()):
        yield vars(model), name, value
        if isinstance(value, dict):
            yield from ((value, key, entry) for key, entry in list(value.items()))
        elif isinstance(value, list):
            yield from ((value, k, entry) for k, entry in enumerate(list(value)))
