# SPDX-License-Identifier: Apache-2.0
"""Values that a call hands to a step: arrays, tensors, and nests of them.

A step that is run eagerly is traced once for values of one structure, dtype and shape,
and fed those of each call; nothing here compares them, or keeps them. Where a graph is
being built, they become part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import _tf, errors
from replicator.inputs import checks
from replicator.primitives import base
from replicator.values import PerReplica


class _Object:
    """An object of a class that tf.nest knows, with numbers for its leaves.

    Args:
        kind: The class.
        facts: What else there is to know of the object; None for one of attrs.
        parts: What it holds, in order.
    """

    def __init__(self, kind: Any, facts: Any, parts: list[Any]) -> None:
        self.parts, self._kind, self._facts = parts, kind, facts

    def of(self, parts: list[Any]) -> Any:
        """Returns such an object of other parts."""
        if hasattr(self._kind, "__tf_unflatten__"):
            return self._kind.__tf_unflatten__(self._facts, tuple(parts))
        return self._kind(*parts)


class Given:
    """A nest of values for one call, with a PerReplica where replicas get their own.

    Args:
        values: The nest.
        what: The argument of `run` that it is, "args" or "input_fn", for messages.
        num_local: How many replicas are built here: the values of a PerReplica.

    Attributes:
        key: Equal for values of one structure, with equal dtypes and shapes.
        leaves: Them as tensors, in order.
        each: Whether there is a PerReplica in it.

    Raises:
        ArgumentError: It is no nest of tensors; an InputError if it is an input.
    """

    def __init__(self, values: Any, what: str, num_local: int) -> None:
        self._what, self._num_local = what, num_local
        self.leaves: list[Any] = []
        self.each = False
        try:
            self._numbered, self.key = self._taken(values)
        except RecursionError:
            raise self._refused(
                "a nest that is too deep, or holds itself", "pass a flat structure."
            ) from None
        if not self.leaves and what != "args":
            raise self._refused("no tensor", "pass tensors or arrays.")

    def stand_ins(self, offset: int, current: list[Any]) -> list[Any]:
        """Adds what stands for the leaves to the function graph being traced.

        Args:
            offset: Where the leaves begin in `current`.
            current: Holds the leaves of a call while the function is called.
        """
        return [
            _tf.capture_at_call(
                lambda k=k: current[k],  # type: ignore[misc]
                tf.type_spec_from_value(leaf),
            )
            for k, leaf in enumerate(self.leaves, offset)
        ]

    def of_each_replica(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the nest of each replica, with these leaves in place of its own."""
        return [_filled(self._numbered, r, leaves) for r in range(self._num_local)]

    def of_one_replica(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns those of the leaves that a replica is given for itself."""
        return [leaves[number] for number in _own(self._numbered, inside=False)]

    def _taken(self, value: Any) -> tuple[Any, Hashable]:
        """Notes the leaves of a nest; returns it with their numbers, and its key."""
        kind = type(value)
        if value is None and self._what == "args":
            return None, None
        if isinstance(value, tuple | list):
            if kind is PerReplica and len(value) != self._num_local:
                raise self._refused(
                    f"a PerReplica of {len(value)} values",
                    f"there are {self._num_local} replicas, and each gets its own.",
                )
            self.each |= kind is PerReplica
            taken = [self._taken(own) for own in value]
            numbered, key = [own for own, _ in taken], tuple(own for _, own in taken)
            return _like(value, numbered), (kind, key)
        if isinstance(value, Mapping):
            self._check_keys(value)
            pairs = {name: self._taken(own) for name, own in value.items()}
            made = copy.copy(value) if isinstance(value, MutableMapping) else {}
            made.update({name: own for name, (own, _) in pairs.items()})
            return made, (kind, tuple((name, key) for name, (_, key) in pairs.items()))
        apart = _apart(value)
        if apart is not None:
            facts, parts = apart
            try:
                hash(facts)
            except TypeError as error:
                raise self._refused(
                    f"a {kind.__name__} with metadata that has no hash "
                    f"({errors.told(error)})",
                    "return metadata of numbers, texts and tuples from __tf_flatten__.",
                ) from error
            taken = [self._taken(own) for own in parts]
            object_ = _Object(kind, facts, [own for own, _ in taken])
            return object_, (kind, facts, tuple(own for _, own in taken))
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
                f"a dict whose keys cannot be sorted ({errors.told(error)})",
                "let the keys of a dict be of one type, such as texts.",
            ) from error

    def _leaf(self, value: Any) -> Any:
        """Returns a leaf as a tensor, or of tensors."""
        if type(value) in (float, bool, np.float32):
            return tf.convert_to_tensor(value)
        if isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value):
            return value
        if _is_variable(value):
            raise self._refused(
                f"the variable {errors.shown(getattr(value, 'name', value))}",
                "step_fn uses variables, models and optimizers as it finds them around "
                "it; pass tf.identity(variable) for the value of now.",
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
                f"{type(value).__name__} {errors.shown(value)}, which is no tensor "
                f"here ({errors.told(error)})",
                "pass tensors, arrays and numbers, or tuples, lists and dicts of them; "
                "what else step_fn needs it finds around it, or by functools.partial.",
            ) from error

    def _refused(self, given: str, fix: str) -> errors.ReplicatorError:
        message = errors.compose(
            f"{self._what} holds {given}.", [f"at {errors.user_line()}"], fix
        )
        kind = errors.ArgumentError if self._what == "args" else errors.InputError
        return kind(message)


def in_graph(leaves: Sequence[Any]) -> list[Any]:
    """Returns leaves that ops of the default graph can take."""
    if tf.compat.v1.get_default_graph().building_function:
        return list(leaves)  # a function captures what is not its own

    def taken(tensor: Any) -> Any:
        eager = isinstance(tensor, tf.Tensor) and not tf.is_symbolic_tensor(tensor)
        return tf.constant(tensor.numpy()) if eager else tensor

    return [
        tf.nest.map_structure(taken, leaf, expand_composites=True) for leaf in leaves
    ]


def _apart(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """Returns metadata and parts of an attrs object or a dataclass made for tf.nest."""
    if isinstance(value, type) or tf.is_tensor(value):
        return None
    if hasattr(value, "__tf_flatten__") and hasattr(value, "__tf_unflatten__"):
        facts, parts = value.__tf_flatten__()
        return facts, parts
    described = getattr(type(value), "__attrs_attrs__", None)
    if described is None or not tf.nest.is_nested(value):
        return None
    return None, [getattr(value, attribute.name) for attribute in described]


def _own(numbered: Any, inside: bool) -> list[int]:
    """Returns the numbers of the leaves that are inside of a PerReplica."""
    if numbered is None:
        return []
    if isinstance(numbered, int):
        return [numbered] if inside else []
    parts = numbered.values() if isinstance(numbered, Mapping) else numbered
    if isinstance(numbered, _Object):
        parts = numbered.parts
    inside = inside or isinstance(numbered, PerReplica)
    return [number for part in parts for number in _own(part, inside)]


def _is_variable(value: Any) -> bool:
    if isinstance(value, tf.Variable):
        return True
    of_keras = type(value).__module__.startswith("keras.")
    return of_keras and isinstance(getattr(value, "value", None), tf.Variable)


def _like(nest: Any, entries: list[Any]) -> Any:
    """Returns a tuple or list of the kind of another."""
    kind = type(nest)
    if hasattr(kind, "_fields"):  # a namedtuple
        return kind(*entries)
    return kind(entries) if kind in (list, PerReplica) else tuple(entries)


def _filled(numbered: Any, replica_id: int, leaves: Sequence[Any]) -> Any:
    """Returns a nest with leaves where their numbers are, for one replica."""
    if numbered is None:
        return None
    if isinstance(numbered, int):
        return leaves[numbered]
    if isinstance(numbered, PerReplica):
        return _filled(numbered[replica_id], replica_id, leaves)
    if isinstance(numbered, _Object):
        return numbered.of([_filled(own, replica_id, leaves) for own in numbered.parts])
    if isinstance(numbered, tuple | list):
        return _like(numbered, [_filled(own, replica_id, leaves) for own in numbered])
    made = copy.copy(numbered)
    for name, own in numbered.items():
        made[name] = _filled(own, replica_id, leaves)
    return made
