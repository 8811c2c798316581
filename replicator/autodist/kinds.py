# SPDX-License-Identifier: Apache-2.0
"""How the value of the whole batch follows from the replicas' values.

A mean over all examples is the mean of the replicas' means, weighted by their numbers
of examples; a sum is their sum, a maximum their maximum. The ops that compute a value
tell which of these it is. Many also multiply or divide by the number of examples n,
which is tracked as a power of n: a sum is n^1 times a mean, and the number of examples
itself is n^1 times a value that is the same everywhere.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from replicator.autodist.wholes import Whole


class Kind(enum.Enum):
    """How a value of the whole batch follows from the values of its parts."""

    SAME = "the same on all replicas"
    ROWS = "one or more rows for each example"
    MEAN = "a mean over the examples"
    MAX = "a maximum"
    MIN = "a minimum"
    RATIO = "a mean over chosen examples"
    PLACES = "positions of examples in a replica's part of the batch"
    SIZES = "sizes, some of which are numbers of examples"
    STATISTIC = "a statistic of the examples that is not a mean over them"
    DRAWN = "random numbers"
    MIXED = "a sum over the examples and something else"
    UNKNOWN = "neither a mean over the examples nor a sum"


Power = float  # exponent of the number of examples as a factor


@dataclasses.dataclass(frozen=True)
class Value:
    """What a tensor is when the examples are split over replicas.

    Attributes:
        kind: How that of the whole batch follows from those of its parts.
        power: The exponent of the number of examples by which it is multiplied.
        axis: For rows: the axis of the examples.
        order: For rows: how they are ordered, () if in the order of the examples.
        each: For rows: how many of them each example has; None if that is unknown.
        some: For rows: identifies the condition by which some were left out, or None.
        by_value: Whether it depends on more than the number of examples.
        over: For a ratio: the chosen rows; `power` is that of their sum.
        mixed: The first op that made rows depend on other examples, if any did.
        wholes: Operands that must be of the whole batch for the value to be of its
            kind.
    """

    kind: Kind
    power: Power = 0
    axis: int = 0
    order: Hashable = ()
    each: int | None = 1
    some: Hashable = None
    by_value: bool = True
    over: tf.Tensor | None = None
    mixed: tf.Operation | None = None
    wholes: frozenset[Whole] = frozenset()

    @property
    def said(self) -> str:
        """The Value described in words."""
        special: dict[tuple[Kind, float], str] = {
            (Kind.MEAN, 1): "a sum over the examples",
            (Kind.SAME, 1): "a number of examples",
        }
        return special.get((self.kind, self.power), self.kind.value)

    def replaced(self, **changes: Any) -> Value:
        """Returns a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)


SAME = Value(Kind.SAME, by_value=False)
UNKNOWN = Value(Kind.UNKNOWN)
STATISTIC = Value(Kind.STATISTIC)
DRAWN = Value(Kind.DRAWN)
MIXED = Value(Kind.MIXED)
PLACES = Value(Kind.PLACES)
SIZES = Value(Kind.SIZES, by_value=False)
# Values whose size does not depend on the number of examples.
_LEVEL = {Kind.SAME, Kind.MEAN, Kind.MAX, Kind.MIN, Kind.RATIO, Kind.STATISTIC}


def is_level(value: Value) -> bool:
    """Whether a value does not grow with the number of examples."""
    if value.kind is Kind.RATIO:
        return value.power == 1
    return value.kind in _LEVEL and value.power == 0


def is_same(value: Value) -> bool:
    """Whether a value is equal on all replicas, however many examples each has."""
    return value.kind is Kind.SAME and value.power == 0 and not value.wholes


def alone(values: Sequence[Value]) -> list[Value]:
    """Returns Values with `mixed` and `wholes` cleared."""
    return [v.replaced(mixed=None, wholes=frozenset()) for v in values]


def made_of(value: Value, values: Sequence[Value]) -> Value:
    """Returns a Value with `mixed` and `wholes` of the Values it follows from added."""
    mixed = next((v.mixed for v in values if v.mixed is not None), None)
    wholes = value.wholes.union(*(v.wholes for v in values))
    return value.replaced(mixed=value.mixed or mixed, wholes=wholes)


def scaled(value: Value, power: Power) -> Value:
    """Returns a Value multiplied by a power of the number of examples."""
    if power and value.kind not in (Kind.SAME, Kind.MEAN, Kind.ROWS, Kind.RATIO):
        return value if value.kind is Kind.UNKNOWN else UNKNOWN
    return value.replaced(power=value.power + power) if power else value


def joined(one: Value, two: Value) -> Value:
    """Returns the Value of a choice between two that all replicas make alike."""
    return made_of(_joined(*alone([one, two])), [one, two])


def _joined(one: Value, two: Value) -> Value:
    if one == two:
        return one
    if one.each != two.each:
        one, two = one.replaced(each=None), two.replaced(each=None)
    if {one.kind, two.kind} <= {Kind.SAME, Kind.MEAN} and one.power == two.power:
        return Value(Kind.MEAN, one.power)
    if one == two:
        return one
    if one.replaced(by_value=True) == two.replaced(by_value=True):
        return one.replaced(by_value=True)
    return UNKNOWN


# --- Of values without rows -----------------------------------------------------------


def added(values: list[Value]) -> Value:
    """Returns the Value of a sum or difference without rows; zeros left out."""
    if not values:
        return SAME
    kinds, powers = {v.kind for v in values}, {v.power for v in values}
    if Kind.DRAWN in kinds and kinds <= {Kind.DRAWN, Kind.SAME, Kind.MEAN}:
        if powers != {0}:  # random numbers do not scale with n
            return MIXED if Kind.MEAN in kinds else UNKNOWN
        if Kind.MEAN not in kinds:
            return DRAWN
        return added([v for v in values if v.kind is not Kind.DRAWN])
    if kinds <= {Kind.SAME, Kind.MEAN}:
        if len(powers) > 1:
            return MIXED if Kind.MEAN in kinds else UNKNOWN
        kind = Kind.MEAN if Kind.MEAN in kinds else Kind.SAME
        return Value(kind, powers.pop(), by_value=kind is Kind.MEAN)
    if Kind.MIXED in kinds and kinds <= {Kind.SAME, Kind.MEAN, Kind.MIXED, Kind.DRAWN}:
        return MIXED
    others = [v for v in values if not is_same(v)]
    if {v.over is not None for v in values} == {True}:
        if len({(id(v.over), v.power) for v in values}) == 1:
            return values[0]
    if len(others) == 1 and others[0].kind in (Kind.MAX, Kind.MIN, Kind.RATIO):
        return others[0] if is_level(others[0]) else MIXED
    return computed(values)


def multiplied(one: Value, two: Value) -> Value:
    """Returns the Value of a product without rows."""
    if one.kind is Kind.SAME:
        one, two = two, one
    if two.kind is Kind.SAME:
        if one.kind in (Kind.SAME, Kind.MEAN, Kind.RATIO):
            return scaled(one, two.power)
    return computed([one, two])


def divided(one: Value, two: Value) -> Value:
    """Returns the Value of a quotient without rows."""
    if two.kind is Kind.SAME:
        return multiplied(one, two.replaced(power=-two.power))
    return computed([one, two])


def negated(value: Value) -> Value:
    """Returns the Value of a negation without rows."""
    swapped = {Kind.MAX: Kind.MIN, Kind.MIN: Kind.MAX}
    return value.replaced(kind=swapped.get(value.kind, value.kind))


def computed(values: list[Value]) -> Value:
    """Returns the Value of any other function of Values without rows."""
    if all(is_same(v) for v in values):
        return SAME
    if {v.kind for v in values} <= {Kind.DRAWN, Kind.SAME}:
        drawn = any(v.kind is Kind.DRAWN for v in values)
        return DRAWN if drawn and not any(v.power for v in values) else UNKNOWN
    if all(is_level(v) or v.kind is Kind.DRAWN for v in values):
        return STATISTIC
    return UNKNOWN


def cast(op: tf.Operation, value: Value) -> Value:
    """Returns the Value of a Cast without rows."""
    rounded = op.inputs[0].dtype.is_floating and not op.outputs[0].dtype.is_floating
    if rounded and value.kind not in (Kind.MAX, Kind.MIN):
        return computed([value]) if not value.power else UNKNOWN
    return value


def each(values: Sequence[Value]) -> int | None:
    """Returns how many rows each example has in aligned rows; None if unknown."""
    return next((v.each for v in values if v.each is not None), None)


def together(values: Sequence[Value]) -> Value:
    """Returns the Value of a vector whose elements are Values without rows."""
    result = values[0]
    for other in values[1:]:
        result = joined(result, other)
    if result.kind is Kind.RATIO:
        return UNKNOWN
    return result if result.kind is not Kind.UNKNOWN else computed(list(values))


def of_start(loss: Value, own: Value) -> Value | None:
    """Returns the Value of a start of differentiation once weighted for its loss.

    Args:
        loss: The sum of all that is differentiated.
        own: The start before weighting.

    Returns:
        None if the weight does not change the Value.
    """
    if loss.over is not None:
        return UNKNOWN
    return scaled(own, 1 - loss.power) if loss.power != 1 else None
