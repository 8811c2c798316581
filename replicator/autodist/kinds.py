# SPDX-License-Identifier: Apache-2.0
"""What becomes of a value when the examples are split over replicas.

A mean over the examples of all replicas is the mean of the replicas' own, weighed by
their examples; a sum is the sum; a maximum the maximum. Which of these a value without
a batch axis is, follows from the ops that compute it. Pure functions of a graph.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import tensorflow as tf


class Kind(enum.Enum):
    """How a value of the whole batch follows from those of its parts."""

    SAME = "the same on all replicas"
    ROWS = "one row or more for each example"
    MEAN = "a mean over the examples"
    SUM = "a sum over the examples"
    COUNT = "a number of examples, or of what each has as many of"
    MAX = "a maximum"
    MIN = "a minimum"
    SHARE = "a number that is divided by that of the examples"
    DRAWN = "random numbers"
    RATIO = "a ratio of two sums over the examples"
    STATISTIC = "a statistic of the examples that is no mean over them"
    MIXED = "a sum over the examples and something else"
    UNKNOWN = "unknown"


ADDED = ("Add", "AddV2", "AddN", "Sub")
SCALED = ("Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan")
LINEAR = (Kind.SAME, Kind.MEAN, Kind.SUM, Kind.COUNT)
_SUMS = (Kind.SUM, Kind.COUNT)
# What nothing says of how the values of the replicas become that of one device.
UNSAID = (Kind.UNKNOWN, Kind.RATIO, Kind.SHARE, Kind.STATISTIC, Kind.DRAWN)
ONLY_DRAWN = {Kind.SAME, Kind.DRAWN}
STATISTICS = {*ONLY_DRAWN, Kind.MEAN, Kind.MAX, Kind.MIN, Kind.STATISTIC}


def joined(kinds: set[Kind]) -> Kind:
    """Returns the kind of what is one of several, as chosen alike on all replicas."""
    if kinds <= {Kind.SAME, Kind.MEAN}:
        return Kind.MEAN
    return Kind.UNKNOWN


def handed_on(op: tf.Operation, kind: Kind) -> Kind:
    """Returns the kind of what an op passes on, or negates."""
    if kind is Kind.ROWS:
        return Kind.UNKNOWN
    if op.type == "Neg":
        return _negated(kind)
    if op.type == "Cast" and kind not in (Kind.SAME, *_SUMS):
        rounded = op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating
        return Kind.UNKNOWN if rounded else kind
    return kind


def added(op: tf.Operation, kinds: Sequence[Kind]) -> Kind:
    """Returns the kind of a sum or difference."""
    found = {
        kind
        for kind, tensor in zip(kinds, op.inputs, strict=True)
        if kind is not Kind.SAME or not _is_zero(tensor)
    }
    if Kind.DRAWN in found and found & {Kind.MEAN, *_SUMS}:
        found = found - {Kind.DRAWN} | {Kind.MEAN}
    if not found <= set(LINEAR):
        return _beside_the_same(op, kinds, found)
    sums = found & set(_SUMS)
    if not sums:
        return Kind.MEAN
    if found - sums:
        return Kind.MIXED
    return Kind.COUNT if found == {Kind.COUNT} else Kind.SUM


def _beside_the_same(op: tf.Operation, kinds: Sequence[Kind], found: set[Kind]) -> Kind:
    """Returns the kind of an extremum or ratio to which what is the same is added."""
    if Kind.MIXED in found:
        return Kind.MIXED
    (*others,) = found - {Kind.SAME}
    if len(others) > 1 or others[0] not in (Kind.MAX, Kind.MIN, Kind.RATIO):
        return Kind.UNKNOWN
    if list(kinds).count(others[0]) > 1:
        return Kind.UNKNOWN
    negated = op.type == "Sub" and kinds[1] is others[0]
    return _negated(others[0]) if negated else others[0]


def _negated(kind: Kind) -> Kind:
    return {Kind.MAX: Kind.MIN, Kind.MIN: Kind.MAX}.get(kind, kind)


def scaled(type_: str, kinds: Sequence[Kind]) -> Kind:
    """Returns the kind of a product or quotient, by the op's type."""
    one, two = kinds
    if two is Kind.SAME:
        return one if one in _SCALABLE else Kind.UNKNOWN
    if type_ in ("Mul", "MulNoNan"):
        if one is Kind.SAME:
            return two if two in _SCALABLE else Kind.UNKNOWN
        return _PRODUCTS.get(frozenset(kinds), Kind.UNKNOWN)
    if one is Kind.SAME and two is Kind.COUNT:
        return Kind.SHARE
    if one in _SUMS and two is Kind.COUNT:
        return Kind.MEAN
    if one in _SUMS and two is Kind.SUM:
        return Kind.RATIO
    return Kind.UNKNOWN


_SCALABLE = {*LINEAR, Kind.RATIO, Kind.SHARE}
_PRODUCTS = {
    frozenset((Kind.MEAN, Kind.COUNT)): Kind.SUM,
    frozenset((Kind.SUM, Kind.SHARE)): Kind.MEAN,
}


def _is_zero(tensor: tf.Tensor) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and bool(np.all(np.equal(value, 0)))
