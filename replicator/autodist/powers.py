# SPDX-License-Identifier: Apache-2.0
"""Rules for powers of the number of examples as factors of values.

Pure functions of ops and of the Values of their operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from replicator.autodist import kinds, tables
from replicator.autodist.kinds import SAME, STATISTIC, UNKNOWN, Kind, Value


def power_of(type_: str, powers: Sequence[float | None]) -> float | None:
    """Returns the exponent of n in an op's result; None if there is no such power.

    Args:
        type_: The op's type.
        powers: The exponents of its operands; None for zeros, which fit any.
    """
    exponents = [power or 0 for power in powers]
    if type_ in tables.TIMES:
        return exponents[0] + exponents[1]
    if type_ in tables.OVER:
        return exponents[0] - exponents[1]
    if not any(exponents):
        return 0
    if type_ in tables.HOMOGENEOUS:
        return exponents[0] * tables.HOMOGENEOUS[type_]
    if type_ in tables.MULTIPLES:
        k = tables.MULTIPLES[type_]
        return None if exponents[1 - k] else exponents[k]
    if type_ in ("Select", "SelectV2"):
        if exponents[0]:
            return None
        powers = powers[1:]
    elif type_ not in tables.ADDED and type_ not in tables.ALIKE:
        return None
    distinct = {power for power in powers if power is not None}
    if len(distinct) != 1:
        return None
    return distinct.pop() * tables.ALIKE.get(type_, 1)


def is_zero(tensor: tf.Tensor) -> bool:
    """Whether a tensor is known to be zeros."""
    if tensor.op.type == "ZerosLike":
        return True
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type == "Fill":
        value = tf.get_static_value(tensor.op.inputs[1])
    if value is None or np.asarray(value).dtype.kind not in "fiuc":
        return False
    return bool(np.all(np.equal(value, 0)))


def reduced(type_: str, value: Value) -> Value:
    """Returns the Value of rows reduced over their examples."""
    if type_ == "Sum":
        if not value.by_value and value.some is None:
            return Value(Kind.SAME, value.power + 1, by_value=False)
        return Value(Kind.MEAN, value.power + 1)
    if type_ == "Mean":
        if value.some is not None:
            return UNKNOWN
        kind = Kind.MEAN if value.by_value else Kind.SAME
        return Value(kind, value.power, by_value=value.by_value)
    if type_ in ("Max", "All", "Min", "Any") and not value.power:
        kind = Kind.MAX if type_ in ("Max", "Any") else Kind.MIN
        if not value.by_value:
            return SAME
        # A selection may be empty on a replica, and then has no extremum.
        return Value(kind) if value.some is None else UNKNOWN
    return UNKNOWN


def computed(op: tf.Operation, values: list[Value]) -> Value:
    """Returns the Value of an op on Values without rows that other rules leave over."""
    if op.type in tables.COMPARISONS and (tested := _tested(op, values)) is not None:
        return tested
    others = [v for v in values if not kinds.is_same(v)]
    other_kinds = {v.kind for v in others}
    if op.type in ("Maximum", "Minimum", "Max", "Min"):
        extreme_kind = Kind.MAX if op.type.startswith("Max") else Kind.MIN
        # The extremum of a value and one that is the same on all replicas, whichever is
        # larger.
        is_single = len(others) == 1 and op.type in ("Maximum", "Minimum")
        if other_kinds <= {Kind.MAX, Kind.MIN} and (
            is_single or other_kinds == {extreme_kind}
        ):
            return Value(others[0].kind)
    if all(v.kind is Kind.SAME for v in values):
        operand_powers = [
            None if is_zero(tensor) else value.power
            for tensor, value in zip(op.inputs, values, strict=True)
        ]
        power = None
        if op.type in tables.ELEMENTWISE and op.outputs[0].dtype.is_floating:
            power = power_of(op.type, operand_powers)
        if power is not None:
            return Value(Kind.SAME, power, by_value=False)
    if op.type in tables.ELEMENTWISE or op.type in _STATISTICS:
        return kinds.computed(values)
    return STATISTIC if kinds.computed(values) is STATISTIC else UNKNOWN


_STATISTICS = frozenset({"Max", "Min", "Prod", "All", "Any", "ArgMax", "L2Loss"})


def _tested(op: tf.Operation, values: Sequence[Value]) -> Value | None:
    """Returns the Value of a comparison with an extremum: true of any or of all."""
    smaller, larger = values
    if op.type.startswith("Greater"):
        smaller, larger = larger, smaller
    if kinds.is_same(smaller) and larger.kind in (Kind.MAX, Kind.MIN):
        return Value(larger.kind)
    if kinds.is_same(larger) and smaller.kind in (Kind.MAX, Kind.MIN):
        return kinds.negated(Value(smaller.kind))
    return None
