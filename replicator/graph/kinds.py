"""What there is to know about all ops of one type, looked up once per type."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Kind:
    """Facts about an op type.

    Attributes:
        seeded: Whether seeds are written into its ops.
        calls: Whether its ops call functions.
        stateful: Whether its ops may do more than compute results from their inputs.
    """

    seeded: bool
    calls: bool
    stateful: bool


_kinds: dict[str, Kind] = {}  # by op type; op.op_def is a costly copy


def kind_of(op: tf.Operation) -> Kind:
    """Returns what is known of the op's type."""
    kind = _kinds.get(op.type)
    if kind is None:
        definition = op.op_def
        attributes = definition.attr
        kind = _kinds[op.type] = Kind(
            seeded={"seed", "seed2"} <= {a.name for a in attributes},
            calls=any(a.type in ("func", "list(func)") for a in attributes),
            stateful=definition.is_stateful,
        )
    return kind
