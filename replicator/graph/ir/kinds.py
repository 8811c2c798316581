# SPDX-License-Identifier: Apache-2.0
"""What there is to know about all ops of one type, looked up once per type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf


@dataclasses.dataclass(frozen=True)
class Kind:
    """Facts about an op type.

    Attributes:
        seeded: Whether seeds are written into its ops.
        calls: Whether its ops call functions.
        stateful: Whether its ops may do more than compute results from their inputs.
        effect: Whether TensorFlow would make its ops run, and in order.
        resources: Whether its ops may be given resources, and do something with them.
    """

    seeded: bool
    calls: bool
    stateful: bool
    effect: bool
    resources: bool


# The control flow of TensorFlow 1, which hands values on as they are.
SWITCHES = ("Switch", "RefSwitch")
MERGES = ("Merge", "RefMerge")
ENTERS = ("Enter", "RefEnter")
EXITS = ("Exit", "RefExit")
NEXT = ("NextIteration", "RefNextIteration")
SWITCHING = frozenset((*SWITCHES, *MERGES, *ENTERS, *EXITS, *NEXT))
# Arrays and stacks of the loops of TensorFlow 1, which see to their order, by values
# that are passed from op to op for that.
_BY_FLOW = ("TensorArray", "Stack")
_RESOURCE = tf.resource.as_datatype_enum
_kinds: dict[str, Kind] = {}  # by op type; op.op_def is a costly copy


def kind_of(op: tf.Operation) -> Kind:
    """Returns what is known of the op's type."""
    kind = _kinds.get(op.type)
    if kind is None:
        definition = op.op_def
        attributes = {a.name: a for a in definition.attr}
        kind = _kinds[op.type] = Kind(
            seeded={"seed", "seed2"} <= attributes.keys(),
            calls=any(a.type in ("func", "list(func)") for a in attributes.values()),
            stateful=definition.is_stateful,
            effect=_tf.is_stateful(op) and not op.type.startswith(_BY_FLOW),
            resources=op.type not in SWITCHING
            and any(
                _may_be_resource(argument, attributes)
                for argument in definition.input_arg
            ),
        )
    return kind


def acting(replicas: Sequence[Sequence[tf.Operation]]) -> list[list[tf.Operation]]:
    """Returns those ops of each replica that may touch a resource or have an effect.

    Some passes look at these only, which are half of all or less.
    """
    return [
        [op for op in ops if (kind := kind_of(op)).resources or kind.effect]
        for ops in replicas
    ]


def chooses(op: tf.Operation) -> bool:
    """Whether an op calls one of its functions, as its first input says."""
    return op.type in ("If", "StatelessIf", "Case", "StatelessCase")


def has_effect(op: tf.Operation) -> bool:
    """Whether an op does something besides computing and reading variables."""
    return kind_of(op).effect and not _tf.only_reads(op)


def _may_be_resource(argument: Any, attributes: Mapping[str, Any]) -> bool:
    """Whether an op's definition lets resources in at one of its arguments."""
    given = argument.type_attr or argument.type_list_attr
    if not given:
        return argument.type == tf.resource.as_datatype_enum
    allowed = attributes[given].allowed_values.list.type
    return not allowed or tf.resource.as_datatype_enum in allowed


def resource_inputs(op: tf.Operation) -> list[tuple[int, tf.Tensor]]:
    """Returns (index, tensor) of the resources among an op's inputs.

    Most ops cannot be given any, and asking each input of a large graph takes long.
    """
    if not kind_of(op).resources:
        return []
    return [
        (k, t)
        for k, t in enumerate(op.inputs)
        if t.dtype.as_datatype_enum == _RESOURCE  # comparing dtypes takes long
    ]


def touched(op: tf.Operation) -> tuple[set[int], set[int]]:
    """Returns the ids of the resources that an op reads, and that it writes."""
    resources = {id(tensor) for _, tensor in resource_inputs(op)}
    if resources and kind_of(op).calls:
        return _tf.resources_touched(op)
    return (resources, set()) if _tf.only_reads(op) else (set(), resources)
