# SPDX-License-Identifier: Apache-2.0
"""The state of a Keras model: its replicated variables, and optimizers to wrap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replicator import errors
from replicator.optimizers.wrapped import Wrapped
from replicator.variables.replicated import plain
from replicator.variables.seen_as_one import SeenAsOne

_CONTAINERS = (list, tuple, set, dict)
_CREATE = "create the model under `with repl.context():`, and call compile there, too."
_MAKE = (
    "create it under `with repl.context():`, and call compile there, which makes "
    "metrics and the optimizer, too; the model itself can stay."
)


def prepare(repl: Any, model: Any) -> None:
    """Wraps a model's optimizers, and checks where its variables were created.

    What is only read, such as the weights of a teacher, may come from anywhere.

    Args:
        repl: The Replicator.
        model: The Keras model, compiled or not.

    Raises:
        ContextError: All that the model trains, or a variable of an optimizer or
            metric, was created outside of the Replicator's context.
        ArgumentError: An optimizer was wrapped to sum gradients, or a layer keeps state
            of rows.
    """
    if repl.num_replicas > 1:
        variables = model.trainable_variables
        inside = list(filter(_is_replicated, variables))
        _check(repl, f"the model {model.name}", inside or variables, _CREATE)
        for metric in _metrics(model):
            owner = f"the metric {metric.name} of the model {model.name}"
            _check(repl, owner, metric.variables, _MAKE)
        _refuse_stateful(model)
    for container, name, optimizer in places(model):
        parts = list(_with_inner(optimizer))
        if parts and not any(isinstance(part, Wrapped) for part in parts):
            if repl.num_replicas > 1:
                owner = f"{name}={type(optimizer).__name__} of the model {model.name}"
                _check(repl, owner, optimizer.variables, _MAKE)
            wrapped = repl.wrap_optimizer(optimizer)
            if container is vars(model):
                setattr(model, name, wrapped)
            else:
                container[name] = wrapped
    for optimizer in wrapped_in(model):
        if optimizer._replicator_combiner.op != "mean":
            raise errors.ArgumentError(
                f"{type(optimizer).__name__} of the model {model.name} was wrapped "
                'with op="sum": what replicas sum is not the gradient of Keras\' '
                "loss, which is a mean over the examples of the batch.",
                fix='wrap it with op="mean", or leave it to keras_model; for a sum '
                'over the examples, give the loss reduction="sum".',
            )


def _refuse_stateful(model: Any) -> None:
    """Raises if a layer keeps state per row from batch to batch."""
    import keras

    for layer in inside(model):
        is_kept = getattr(layer, "stateful", False) is True
        is_metric = isinstance(layer, keras.metrics.Metric)
        if is_kept and hasattr(layer, "reset_state") and not is_metric:
            raise errors.ArgumentError(
                f"the layer {layer.name} of the model {model.name} is stateful: it "
                "keeps state for each row of a batch, but a replica gets only some of "
                "the rows.",
                fix="create it with stateful=False, or run the model on one device.",
            )


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


def _metrics(model: Any) -> list[Any]:
    """Returns the metrics of a model, whether it lists them or not."""
    import keras

    nested = [part for part in inside(model) if isinstance(part, keras.metrics.Metric)]
    return [*model.metrics, *nested]


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


def wrapped_in(model: Any) -> list[Wrapped]:
    """Returns the wrapped optimizers among a model's attributes."""
    return [
        optimizer
        for _, _, value in places(model)
        for optimizer in _with_inner(value)
        if isinstance(optimizer, Wrapped)
    ]


def _with_inner(value: Any) -> Iterator[Any]:
    """Yields a value if it is an optimizer, and the inner one whose loss it scales."""
    import keras

    if isinstance(value, keras.optimizers.Optimizer):
        yield value
        inner = getattr(value, "inner_optimizer", None)
        if inner is not None:
            yield inner


def _is_replicated(variable: Any) -> bool:
    return isinstance(plain(variable), SeenAsOne)


def _check(repl: Any, what: str, variables: Any, fix: str) -> None:
    """Raises ContextError if a variable is not replicated."""
    for variable in variables:
        inner = plain(variable)
        if not isinstance(inner, SeenAsOne):
            path = getattr(variable, "path", variable.name)
            raise errors.ContextError(
                f"{what} holds the variable {path}, which was created outside of the "
                "context and has no component per replica.",
                fix=fix,
            )
        if inner.world != repl._settings.world:
            raise errors.ContextError(
                f"{what} was created under the context of another Replicator, of "
                f"{inner.world.num_replicas} replicas.",
                fix="call keras_model of that Replicator.",
            )
