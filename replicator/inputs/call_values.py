# SPDX-License-Identifier: Apache-2.0
"""Values that a call passes to a step: arrays, tensors, and nests of them.

A step that runs eagerly is traced once for values of one structure, dtype and shape,
and then fed each call's values; nothing here compares or caches them. While a graph is
being built, they become part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator._tf import functions
from replicator.inputs import checks
from replicator.primitives import base
from replicator.values import PerReplica


class _Object:
    """An object of a class that tf.nest knows, with numbers for its leaves.

    Args:
        kind: The class.
        facts: The object's metadata; None for an attrs object.
        parts: Its fields, in order.
    """

    def __init__(self, kind: Any, facts: Any, parts: list[Any]) -> None:
        self.parts, self._kind, self._facts = parts, kind, facts

    def of(self, parts: list[Any]) -> Any:
        """Returns an object of the same class and metadata with other fields."""
        if hasattr(self._kind, "__tf_unflatten__"):
            return self._kind.__tf_unflatten__(self._facts, tuple(parts))
        return self._kind(*parts)


class CallValues:
    """The values of one call; a PerReplica in the nest gives each replica its own.

    Args:
        values: The nest.
        argument: The argument of `run` that it comes from, "args" or "input_fn", for
            messages.
        num_local: The number of local replicas, and of the values in a PerReplica.

    Attributes:
        key: Equal for values of the same structure, dtypes and shapes.
        leaves: The leaves as tensors, in order.
        has_per_replica: Whether the nest contains a PerReplica.

    Raises:
        ArgumentError: The values are not a nest of tensors; an InputError for inputs.
    """

    def __init__(self, values: Any, argument: str, num_local: int) -> None:
        self._argument, self._num_local = argument, num_local
        self.leaves: list[Any] = []
        self.has_per_replica = False
        try:
            self._numbered, self.key = self._collected(values)
        except RecursionError:
            raise self._refused(
                "a nest that is too deep, or contains itself", "pass a flat structure."
            ) from None
        if not self.leaves and argument != "args":
            raise self._refused("no tensor", "pass tensors or arrays.")

    def placeholders(self, offset: int, current: list[Any]) -> list[Any]:
        """Captures the leaves of each call in the function graph being traced.

        Args:
            offset: Where the leaves begin in `current`.
            current: Holds a call's leaves while the function runs.
        """
        return [
            functions.capture_at_call(
                lambda k=k: current[k],  # type: ignore[misc]
                tf.type_spec_from_value(leaf),
            )
            for k, leaf in enumerate(self.leaves, offset)
        ]

    def of_each_replica(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns each replica's nest, with these leaves in place of its own."""
        return [_filled(self._numbered, r, leaves) for r in range(self._num_local)]

    def of_one_replica(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the leaves inside a PerReplica, which only one replica gets."""
        return [
            leaves[number]
            for number in _leaves_per_replica(self._numbered, is_inside=False)
        ]

    def _collected(self, value: Any) -> tuple[Any, Hashable]:
        """Collects the leaves of a nest; returns it with their numbers, and its key."""
        kind = type(value)
        if value is None and self._argument == "args":
            return None, None
        if isinstance(value, tuple | list):
            if kind is PerReplica and len(value) != self._num_local:
                raise self._refused(
                    f"a PerReplica of {len(value)} values",
                    f"pass one value for each of the {self._num_local} replicas.",
                )
            self.has_per_replica |= kind is PerReplica
            entries = [self._collected(entry) for entry in value]
            numbered, key = [n for n, _ in entries], tuple(k for _, k in entries)
            return _like(value, numbered), (kind, key)
        if isinstance(value, Mapping):
            self._check_keys(value)
            pairs = {name: self._collected(entry) for name, entry in value.items()}
            nest = copy.copy(value) if isinstance(value, MutableMapping) else {}
            nest.update({name: numbered for name, (numbered, _) in pairs.items()})
            return nest, (kind, tuple((name, key) for name, (_, key) in pairs.items()))
        flattened = _flattened(value)
        if flattened is not None:
            facts, parts = flattened
            try:
                hash(facts)
            except TypeError as error:
                raise self._refused(
                    f"a {kind.__name__} whose metadata cannot be hashed "
                    f"({errors.summary(error)})",
                    "return metadata of numbers, strings and tuples from "
                    "__tf_flatten__.",
                ) from error
            entries = [self._collected(entry) for entry in parts]
            object_ = _Object(kind, facts, [n for n, _ in entries])
            return object_, (kind, facts, tuple(k for _, k in entries))
        leaf = self._leaf(value)
        self.leaves.append(leaf)
        if isinstance(leaf, tf.Tensor):
            shape = leaf.shape
            key = leaf.dtype, None if shape.rank is None else tuple(shape.as_list())
            return len(self.leaves) - 1, key
        return len(self.leaves) - 1, tf.type_spec_from_value(leaf)

    def _check_keys(self, value: Mapping[Any, Any]) -> None:
        try:
            sorted(value)
        except TypeError as error:
            raise self._refused(
                f"a dict whose keys cannot be sorted ({errors.summary(error)})",
                "use keys of one type, such as strings.",
            ) from error

    def _leaf(self, value: Any) -> Any:
        """Returns a leaf as a tensor, or as a composite of tensors."""
        if type(value) in (float, bool, np.float32):
            return tf.convert_to_tensor(value)
        if isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value):
            return value
        if _is_variable(value):
            raise self._refused(
                f"the variable {errors.repr_of(getattr(value, 'name', value))}",
                "let step_fn use variables, models and optimizers from the code around "
                "it; pass tf.identity(variable) for the current value.",
            )
        try:
            if checks.source_kind(value) != "a tensor structure":
                raise TypeError(f"it is {checks.source_kind(value)}")
            if tf.is_tensor(value) and not isinstance(value, tf.Tensor):
                if isinstance(tf.type_spec_from_value(value), tf.data.DatasetSpec):
                    raise TypeError("it is a Dataset")
                return tf.nest.map_structure(base.usable, value, expand_composites=True)
            return base.usable(value)
        except base.UNCONVERTED as error:
            raise self._refused(
                f"{type(value).__name__} {errors.repr_of(value)}, which is not a "
                "tensor "
                f"here ({errors.summary(error)})",
                "pass tensors, arrays and numbers, or tuples, lists and dicts of them; "
                "let step_fn get all else from the code around it, or by "
                "functools.partial.",
            ) from error

    def _refused(self, content: str, fix: str) -> errors.ReplicatorError:
        message = errors.compose(
            f"{self._argument} holds {content}.", [f"at {errors.user_line()}"], fix
        )
        kind = errors.ArgumentError if self._argument == "args" else errors.InputError
        return kind(message)


def in_graph(leaves: Sequence[Any]) -> list[Any]:
    """Converts leaves to tensors that ops of the default graph can take."""
    if tf.compat.v1.get_default_graph().building_function:
        return list(leaves)  # a function captures foreign tensors

    def usable(tensor: Any) -> Any:
        eager = isinstance(tensor, tf.Tensor) and not tf.is_symbolic_tensor(tensor)
        return tf.constant(tensor.numpy()) if eager else tensor

    return [
        tf.nest.map_structure(usable, leaf, expand_composites=True) for leaf in leaves
    ]


def _flattened(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """Returns the metadata and fields of an attrs object or a tf.nest dataclass."""
    if isinstance(value, type) or tf.is_tensor(value):
        return None
    if hasattr(value, "__tf_flatten__") and hasattr(value, "__tf_unflatten__"):
        facts, parts = value.__tf_flatten__()
        return facts, parts
    attributes = getattr(type(value), "__attrs_attrs__", None)
    if attributes is None or not tf.nest.is_nested(value):
        return None
    return None, [getattr(value, attribute.name) for attribute in attributes]


def _leaves_per_replica(numbered: Any, is_inside: bool) -> list[int]:
    """Returns the numbers of the leaves that are inside of a PerReplica."""
    if numbered is None:
        return []
    if isinstance(numbered, int):
        return [numbered] if is_inside else []
    parts = numbered.values() if isinstance(numbered, Mapping) else numbered
    if isinstance(numbered, _Object):
        parts = numbered.parts
    is_inside = is_inside or isinstance(numbered, PerReplica)
    return [number for part in parts for number in _leaves_per_replica(part, is_inside)]


def _is_variable(value: Any) -> bool:
    if isinstance(value, tf.Variable):
        return True
    of_keras = type(value).__module__.startswith("keras.")
    return of_keras and isinstance(getattr(value, "value", None), tf.Variable)


def _like(nest: Any, entries: list[Any]) -> Any:
    """Returns a namedtuple, PerReplica, list or tuple, as another is."""
    kind = type(nest)
    if hasattr(kind, "_fields"):  # a namedtuple
        return kind(*entries)
    if isinstance(nest, list):  # maybe one that TensorFlow tracks for a module
        return entries
    return PerReplica(entries) if kind is PerReplica else tuple(entries)


def _filled(numbered: Any, replica_id: int, leaves: Sequence[Any]) -> Any:
    """Replaces the numbers in a nest by their leaves, for one replica."""
    if numbered is None:
        return None
    if isinstance(numbered, int):
        return leaves[numbered]
    if isinstance(numbered, PerReplica):
        return _filled(numbered[replica_id], replica_id, leaves)
    if isinstance(numbered, _Object):
        return numbered.of([_filled(n, replica_id, leaves) for n in numbered.parts])
    if isinstance(numbered, tuple | list):
        return _like(numbered, [_filled(n, replica_id, leaves) for n in numbered])
    filled = copy.copy(numbered)
    for name, entry in numbered.items():
        filled[name] = _filled(entry, replica_id, leaves)
    return filled
