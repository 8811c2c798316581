# SPDX-License-Identifier: Apache-2.0
"""Checks what is passed to a wrapped optimizer while the user's line is on the stack.

The families of optimizers raise different errors, if they notice at all: some go on
with integer gradients, or with fewer gradients than variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.primitives import base, flows
from replicator.variables.replicated import plain


def entries(who: str, name: str, values: Any) -> list[Any]:
    """Returns the entries of a list or of another ordered collection.

    Args:
        who: The optimizer, for messages.
        name: What the entries are: "gradients", ...
        values: What the user passed.

    Raises:
        ArgumentError: It cannot be iterated over.
    """
    try:
        if isinstance(values, str | bytes) or tf.is_tensor(values):
            raise TypeError
        return list(values)
    except base.UNCONVERTED:
        raise base.bad_argument(
            who,
            f"was given {errors.repr_of(values)} as {name}",
            f"pass a list of {name}, one entry per variable.",
        ) from None


def pairs(who: str, grads_and_vars: Any) -> tuple[list[Any], list[Any]]:
    """Returns the gradients and the variables of a list of pairs.

    Args:
        who: The optimizer, for messages.
        grads_and_vars: What the user passed.

    Raises:
        ArgumentError: They are not pairs.
    """
    listed = entries(who, "pairs (gradient, variable)", grads_and_vars)
    for pair in listed:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise base.bad_argument(
                who,
                f"was given {errors.repr_of(pair)} as a gradient and its variable",
                "pass pairs, as in zip(gradients, variables).",
            )
    return [gradient for gradient, _ in listed], [variable for _, variable in listed]


def check_counts(who: str, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raises ArgumentError unless there are as many gradients as variables.

    Args:
        who: The optimizer, for messages.
        grads: What the user passed.
        variables: What the user passed.
    """
    if len(grads) != len(variables):
        raise base.bad_argument(
            who,
            f"was given {len(grads)} gradients for {len(variables)} variables",
            "pass one gradient per variable; None where there is none.",
        )


def check(who: str, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raises ReplicatorError unless all can be gradients of their variables, or None.

    Args:
        who: The optimizer, for messages.
        grads: What the user passed.
        variables: What the user passed; as many.
    """
    for gradient, variable in zip(grads, variables, strict=True):
        if not isinstance(plain(variable), tf.Variable):
            raise base.bad_argument(
                who,
                f"was given {errors.repr_of(variable)} as a variable",
                "pass tf.Variables, or those of Keras.",
            )
        if isinstance(plain(variable), tf.distribute.DistributedValues):
            _refuse_of_strategy(who, variable)
        if gradient is not None:
            _check_gradient(who, gradient, variable)


def refuse_combined(who: str, options: Mapping[str, Any]) -> None:
    """Raises ArgumentError if the caller says that gradients are already combined.

    Args:
        who: The optimizer, for messages.
        options: The arguments of apply_gradients, by name.
    """
    is_skipped = options.get("skip_gradients_aggregation", False)
    if is_skipped or not options.get("experimental_aggregate_gradients", True):
        raise errors.ArgumentError(
            f"{who} is wrapped and combines the gradients of the replicas, but the "
            "call says that they are already combined.",
            fix="leave out skip_gradients_aggregation=True (or "
            "experimental_aggregate_gradients=False), and the all_reduce before it.",
        )


def _refuse_of_strategy(who: str, variable: Any) -> None:
    """Raises ContextError because the variable belongs to a tf.distribute strategy."""
    replica = context.require(who)
    raise errors.ContextError(
        f"{who} on replica {replica.replica_id} was given variable {variable.name}, "
        "which was created under a tf.distribute strategy.",
        fix="create the model under `with repl.context():`, in place of "
        "`strategy.scope()`.",
    )


def _check_gradient(who: str, gradient: Any, variable: Any) -> None:
    name = getattr(variable, "name", "?")
    leaves = base.flatten(gradient, who)
    if len(leaves) != 1 or not flows.is_differentiable(leaves[0]):
        raise base.bad_argument(
            who,
            f"was given {errors.repr_of(gradient)} as the gradient of {name}",
            "gradients are tensors of floating or complex numbers, or None; integers "
            "have none.",
        )
    (leaf,) = leaves
    if isinstance(leaf, tf.Tensor) and not leaf.shape.is_compatible_with(
        variable.shape
    ):
        raise base.bad_argument(
            who,
            f"was given a gradient of shape {leaf.shape} for {name} of shape "
            f"{variable.shape}",
            "a gradient has the shape of its variable.",
        )
