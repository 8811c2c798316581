# SPDX-License-Identifier: Apache-2.0
"""Validates input_fns and the elements that they feed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors, values
from replicator._tf import frames
from replicator.primitives import base

DATASETS = (tf.data.Dataset, tf.compat.v1.data.Dataset)
_SOURCES = (
    "return a tf.data.Dataset (for several, tf.data.Dataset.zip of them), a function "
    "without arguments that returns a nest of tensors, or a nest of tensors."
)


def check_source(source: Any, input_fn: Callable[..., Any], input_mode: str) -> None:
    """Raises InputError unless an input_fn's result can feed a replica."""
    kind = source_kind(source)
    origin = "input_fn", input_fn
    if kind == "an iterator":
        raise unusable(
            *origin,
            "an iterator, which cannot be pulled inside a graph",
            "return a tf.data.Dataset, not its iterator; for a Python generator, use "
            "tf.data.Dataset.from_generator(function, output_signature=...).",
        )
    if kind == "a function" and required(source):
        raise unusable(*origin, "a function that requires arguments")
    if kind == "a tensor structure":
        check_element(source, *origin)
        if values.is_in(source):
            raise unusable(
                *origin,
                "a PerReplica, of which each replica would get all values",
                "return the value of replica ctx.replica_id, for an argument ctx of "
                "input_fn; or pass the PerReplica itself in place of input_fn.",
            )
    if input_mode == "per_worker" and kind != "a Dataset":
        raise errors.InputError(
            f"input_fn {name_of(input_fn)} returned {kind} with "
            'input_mode="per_worker", which deals out the elements of one Dataset.',
            errors.sites_of("input_fn", input_fn),
            'return a tf.data.Dataset, or use input_mode="per_replica".',
        )


def not_one_batch(who: str) -> errors.InputError:
    """Returns the error for a PerReplica in place of one value for all replicas.

    Args:
        who: The subject of the sentence, with its verb.
    """
    return errors.InputError(
        f'{who} a PerReplica with input_mode="global_batch", which splits one '
        "batch for all replicas.",
        fix='pass one batch; or use input_mode="per_replica", where each replica gets '
        "its own value.",
    )


def call(
    function: Callable[..., Any], arguments: Sequence[Any], role: str = "input_fn"
) -> Any:
    """Calls an input_fn, or a function that one returned.

    Raises:
        InputError: The function belongs to another library and has another signature.
            Errors of the user's own code pass unchanged.
    """
    try:
        return function(*arguments)
    except TypeError as error:
        if frames.passed_user_code(error):
            raise
        raise errors.InputError(
            f"{role} {name_of(function)} cannot be called with {len(arguments)} "
            f"arguments: {errors.summary(error)}.",
            fix="pass a function of your own, which takes an InputContext, or nothing.",
        ) from error


def check_here(dataset: tf.data.Dataset) -> None:
    """Raises InputError unless a Dataset belongs to the current outermost context."""
    variant = tf.data.experimental.to_variant(dataset)
    symbolic = tf.is_symbolic_tensor(variant)
    if tf.executing_eagerly():
        if not symbolic:
            return
        where = "of another graph or function (an argument of it, say)"
    elif symbolic and variant.graph is tf.compat.v1.get_default_graph():
        return
    else:
        where = "of another graph" if symbolic else "created eagerly"
    raise errors.InputError(
        f"the inputs are a Dataset {where}, whose iterator could not continue from "
        "step to step here.",
        fix="create the Dataset where the step is run from, outside tf.functions, in "
        "the same tf.Graph if there is one; or pass an input_fn that creates it.",
    )


def check_element(element: Any, role: str, function: Any) -> None:
    """Raises InputError unless an element is a nest of tensors.

    Args:
        element: The value that was returned.
        role: The role of the function that returned it, in words.
        function: That function.
    """
    if element is None:
        raise unusable(role, function, "nothing")
    try:
        leaves = tf.nest.flatten(element)
    except base.UNCONVERTED as error:
        problem = f"a value that is not a nest of tensors ({errors.summary(error)})"
        raise unusable(role, function, problem) from error
    if not leaves or any(leaf is None for leaf in leaves):
        description = f"{errors.repr_of(element)}, which holds no tensor"
        raise unusable(role, function, description)
    for leaf in leaves:
        if source_kind(leaf) != "a tensor structure":
            raise unusable(
                role, function, f"a structure that holds {source_kind(leaf)}"
            )
        try:
            spec = tf.type_spec_from_value(leaf)
        except base.UNCONVERTED:
            spec = None
        if spec is None or isinstance(spec, tf.data.DatasetSpec):
            name = type(leaf).__name__
            raise unusable(role, function, f"{name}, which is not a tensor") from None


def unusable(
    role: str, function: Any, returned: str, fix: str = _SOURCES
) -> errors.InputError:
    """Returns the error for a function whose result cannot feed a replica."""
    return errors.InputError(
        f"{role} {name_of(function)} returned {returned}.",
        errors.sites_of(role, function),
        fix,
    )


def specs(element: Any) -> Any:
    """Returns the tf.TypeSpecs of an element's leaves."""
    return tf.nest.map_structure(tf.type_spec_from_value, element)


def source_kind(source: Any) -> str:
    """Returns the kind of an input_fn's result, in words."""
    if isinstance(source, DATASETS):
        return "a Dataset"
    if isinstance(source, tf.data.Iterator) or hasattr(source, "__next__"):
        return "an iterator"
    if callable(source) and not tf.is_tensor(source):
        return "a function"
    return "a tensor structure"


def check_equal_specs(specs: Sequence[Any]) -> None:
    """Raises InputError unless all replicas' elements have the same structure."""
    first = _dtypes(specs[0])
    for r, spec in enumerate(specs[1:], 1):
        try:
            tf.nest.assert_same_structure(specs[0], spec)
            is_equal = _dtypes(spec) == first
        except (TypeError, ValueError):
            is_equal = False
        if not is_equal:
            raise errors.InputError(
                "input_fn feeds the replicas differently.",
                [
                    f"replica 0: {errors.repr_of(specs[0])}",
                    f"replica {r}: {errors.repr_of(spec)}",
                    f"at {errors.user_line()}",
                ],
                "give the elements of all replicas the same structure and the same "
                "dtypes.",
            )


def _dtypes(spec: Any) -> list[tuple[type, Any]]:
    leaves = tf.nest.flatten(spec)
    return [(type(leaf), getattr(leaf, "dtype", None)) for leaf in leaves]


def name_of(input_fn: Callable[..., Any]) -> str:
    """Returns the name of an input_fn for messages: the same on all hosts."""
    while isinstance(input_fn, functools.partial):
        input_fn = input_fn.func
    name = getattr(input_fn, "__name__", None)
    return name if isinstance(name, str) else type(input_fn).__name__


def required(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of a function that have no default."""
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p
        for p in parameters(function)
        if p.kind not in starred and p.default is p.empty
    ]


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns a function's parameters; none if its signature is unknown."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []  # some builtins have no signature
