# SPDX-License-Identifier: Apache-2.0
"""Facts about op types, looked up once per type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import effects


@dataclasses.dataclass(frozen=True)
class Kind:
    """Facts about an op type.

    Attributes:
        seeded: Whether its ops have seed attributes.
        calls: Whether its ops call functions.
        stateful: Whether its ops may do more than compute results from their inputs.
        effect: Whether TensorFlow's automatic control dependencies run and order its
            ops.
        resources: Whether its ops may take resources as inputs, and act on them.
    """

    seeded: bool
    calls: bool
    stateful: bool
    effect: bool
    resources: bool


PYTHON = ("EagerPyFunc", "PyFunc", "PyFuncStateless")  # call a Python function
_RESOURCE = tf.resource.as_datatype_enum
_kinds: dict[str, Kind] = {}  # by op type; op.op_def is a costly copy


def kind_of(op: tf.Operation) -> Kind:
    """Returns the facts about an op's type."""
    kind = _kinds.get(op.type)
    if kind is None:
        definition = op.op_def
        attributes = {a.name: a for a in definition.attr}
        kind = _kinds[op.type] = Kind(
            seeded={"seed", "seed2"} <= attributes.keys(),
            calls=any(a.type in ("func", "list(func)") for a in attributes.values()),
            stateful=definition.is_stateful,
            effect=effects.is_stateful(op),
            resources=any(
                _may_be_resource(argument, attributes)
                for argument in definition.input_arg
            ),
        )
    return kind


def acting(replicas: Sequence[Sequence[tf.Operation]]) -> list[list[tf.Operation]]:
    """Returns each replica's ops that may touch a resource or have an effect.

    For passes that look at no others; usually half of all ops or fewer.
    """
    return [
        [op for op in ops if (kind := kind_of(op)).resources or kind.effect]
        for ops in replicas
    ]


def chooses(op: tf.Operation) -> bool:
    """Whether an op's first input selects which of its functions is called."""
    return op.type in ("If", "StatelessIf", "Case", "StatelessCase")


def has_effect(op: tf.Operation) -> bool:
    """Whether an op does more than compute results and read variables."""
    return kind_of(op).effect and not effects.only_reads(op)


def _may_be_resource(argument: Any, attributes: Mapping[str, Any]) -> bool:
    """Whether an argument in an op's definition accepts resources."""
    type_attr = argument.type_attr or argument.type_list_attr
    if not type_attr:
        return argument.type == tf.resource.as_datatype_enum
    dtypes = attributes[type_attr].allowed_values.list.type
    return not dtypes or tf.resource.as_datatype_enum in dtypes


def resource_inputs(op: tf.Operation) -> list[tuple[int, tf.Tensor]]:
    """Returns (index, tensor) for each resource among an op's inputs.

    Asks the op's type first: checking every input of a large graph is slow.
    """
    if not kind_of(op).resources:
        return []
    return [
        (k, t)
        for k, t in enumerate(op.inputs)
        if t.dtype.as_datatype_enum == _RESOURCE  # comparing dtypes is slow
    ]


def touched(op: tf.Operation) -> tuple[set[int], set[int]]:
    """Returns the ids of the resources that an op reads, and of those it writes."""
    resources = {id(tensor) for _, tensor in resource_inputs(op)}
    if resources and kind_of(op).calls:
        return effects.resources_touched(op)
    return (resources, set()) if effects.only_reads(op) else (set(), resources)
