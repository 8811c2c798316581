# SPDX-License-Identifier: Apache-2.0
"""The state of a Keras model: its replicated variables, and optimizers to wrap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replicator import errors
from replicator.keras import parts
from replicator.optimizers.wrapped import Wrapped
from replicator.variables.replicated import plain
from replicator.variables.seen_as_one import SeenAsOne

_CREATE = "create the model under `with repl.context():`, and call compile there, too."
_MAKE = "create it under `with repl.context():`, and call compile there."


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
        _refuse_compiled_outside(repl, model)
        for metric in parts.metrics(model):
            owner = f"the metric {metric.name} of the model {model.name}"
            _check(repl, owner, metric.variables, _MAKE)
        _refuse_stateful(model)
    for container, name, optimizer in parts.places(model):
        if _is_optimizer(optimizer) and not is_wrapped(optimizer):
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
                errors.compose(
                    f"{type(optimizer).__name__} of the model {model.name} was wrapped "
                    'with op="sum": what replicas sum is not the gradient of Keras\' '
                    "loss, which is a mean over the examples of the batch.",
                    [f"at {errors.user_line()}"],
                    'wrap it with op="mean", or leave it to keras_model; for a sum '
                    'over the examples, give the loss reduction="sum".',
                )
            )


def _refuse_stateful(model: Any) -> None:
    """Raises if a layer keeps state per row from batch to batch."""
    import keras

    for layer in parts.inside(model):
        if getattr(layer, "stateful", False) is True and hasattr(layer, "reset_state"):
            if isinstance(layer, keras.metrics.Metric):
                continue
            raise errors.ArgumentError(
                errors.compose(
                    f"the layer {layer.name} of the model {model.name} is stateful: it "
                    "keeps state for each row of a batch, but a replica gets only "
                    "some of the rows.",
                    [f"at {errors.user_line()}"],
                    "create it with stateful=False, or run the model on one device.",
                )
            )


def wrapped_in(model: Any) -> list[Wrapped]:
    """Returns the wrapped optimizers among a model's attributes."""
    return [
        optimizer
        for _, _, value in parts.places(model)
        for optimizer in _with_inner(value)
        if isinstance(optimizer, Wrapped)
    ]


def is_wrapped(optimizer: Any) -> bool:
    """Whether an optimizer, or its inner optimizer, is wrapped."""
    return any(isinstance(part, Wrapped) for part in _with_inner(optimizer))


def _with_inner(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer, and the inner one whose loss it scales."""
    if _is_optimizer(optimizer):
        yield optimizer
        inner = getattr(optimizer, "inner_optimizer", None)
        if inner is not None:
            yield inner


def _is_optimizer(value: Any) -> bool:
    import keras

    return isinstance(value, keras.optimizers.Optimizer)


def _refuse_compiled_outside(repl: Any, model: Any) -> None:
    """Raises ContextError if `compile` was called outside of the context.

    Only `compile` creates a metric for the loss, the first that a model lists.
    """
    import keras

    loss: Any = next(iter(model.metrics), None)
    if type(loss) is keras.metrics.Mean and loss.name == "loss":
        if not all(map(_is_replicated, loss.variables)):
            raise errors.ContextError(
                errors.compose(
                    f"the model {model.name} was compiled outside of the context: the "
                    "metrics and optimizer that compile creates were created outside, "
                    "too, and have no component per replica.",
                    [f"at {errors.user_line()}"],
                    "call compile under `with repl.context():`, and create the "
                    "optimizer and metrics that it is given there; the model itself "
                    "can stay.",
                )
            )


def _is_replicated(variable: Any) -> bool:
    return isinstance(plain(variable), SeenAsOne)


def _check(repl: Any, what: str, variables: Any, fix: str) -> None:
    """Raises ContextError if a variable is not replicated."""
    for variable in variables:
        inner = plain(variable)
        if not isinstance(inner, SeenAsOne):
            path = getattr(variable, "path", variable.name)
            raise errors.ContextError(
                errors.compose(
                    f"{what} holds the variable {path}, which was created outside "
                    "of the context and has no component per replica.",
                    [f"at {errors.user_line()}"],
                    fix,
                )
            )
        if inner.world != repl._settings.world:
            raise errors.ContextError(
                errors.compose(
                    f"{what} was created under the context of another Replicator, of "
                    f"{inner.world.num_replicas} replicas.",
                    [f"at {errors.user_line()}"],
                    "call keras_model of that Replicator.",
                )
            )
