# SPDX-License-Identifier: Apache-2.0
"""What a model is made of, found by its attributes, in containers and layers too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_CONTAINERS = (list, tuple, set, dict)


def inside(model: Any) -> Iterator[Any]:
    """Yields a model and the layers, models and metrics inside of it, each once.

    Keras lists metrics by a property that models override, and none of those that the
    models in a model have.

    Args:
        model: A Keras model.
    """
    import keras

    kinds = (keras.layers.Layer, keras.metrics.Metric)
    seen: set[int] = set()
    remaining = [model]
    while remaining:
        found = remaining.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, kinds):
            yield found
            remaining += [one for one in vars(found).values() if _leads_on(one, kinds)]
        else:
            values = found.values() if isinstance(found, dict) else found
            remaining += [one for one in values if _leads_on(one, kinds)]


def _leads_on(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, (*kinds, *_CONTAINERS))


def metrics(model: Any) -> list[Any]:
    """Returns all metrics of a model, whether it lists them or not."""
    import keras

    def is_public(metric: Any) -> bool:
        """Whether it is no list of metrics that Keras has for itself."""
        kind = type(metric)
        own = kind.__module__.partition(".")[0] == "keras"
        return not own or hasattr(keras.metrics, kind.__name__)

    found = [one for one in inside(model) if isinstance(one, keras.metrics.Metric)]
    return [*model.metrics, *filter(is_public, found)]


def places(model: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yields each attribute of a model, and what a list or dict among them holds.

    Args:
        model: A Keras model.

    Yields:
        (container, key, value): `vars(model)`, or a list or a dict.
    """
    for name, value in list(vars(model).items()):
        yield vars(model), name, value
        if isinstance(value, dict):
            yield from ((value, key, one) for key, one in list(value.items()))
        elif isinstance(value, list):
            yield from ((value, k, one) for k, one in enumerate(list(value)))
