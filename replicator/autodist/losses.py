# SPDX-License-Identifier: Apache-2.0
"""What a loss is when the examples are split: what its gradients start from.

The sum of the replicas' gradients is to be the gradient of one device. A loss that is a
mean over a replica's examples counts by its share of them, one that is a sum counts as
it is, and one that is divided by something else counts by its share of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replicator import errors
from replicator.autodist import kinds, powers, wholes
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value, multiplied
from replicator.autodist.values import Values

MEAN, SUM = Value(Kind.MEAN), Value(Kind.MEAN, 1)
DECLARED = {"mean": MEAN, "sum": SUM}
_WAY_OUT = (
    "let tf.reduce_mean or tf.reduce_sum over the examples make it, be it divided by "
    "what has no variable in it; or say what it is, "
    'loss="mean" or loss="sum", to AutoDist.function or create_distributed_session.'
)


def find(
    known: Values,
    targets: Sequence[tf.Tensor],
    given: Sequence[tf.Tensor | None],
    declared: str | None,
) -> Value:
    """Returns what is differentiated: the same for all, a mean, a sum or a ratio.

    Args:
        known: Finds what is known of what is in the graph.
        targets: What is differentiated, all of it added up.
        given: The gradients that were given of them; None where they are ones.
        declared: What the user says that it is, "mean" or "sum", if anything.

    Raises:
        UnsupportedError: No weight makes the gradients those of one device.
    """
    own = known.not_kept(targets)
    if own is not None:
        raise _own_gradient(own)
    values = [_total(known, t, g) for t, g in zip(targets, given, strict=True)]
    made = frozenset[wholes.Whole]().union(*(v.wholes for v in values))
    differing = [
        (value, target)
        for value, target in zip(values, targets, strict=True)
        if kinds.alone([value])[0].replaced(by_value=False) != SAME
    ]
    if not differing and not made:
        return SAME
    mixed = next((v.mixed for v, _ in differing if v.mixed is not None), None)
    if mixed is not None and known.follows_gradient(mixed):
        raise _of_gradient(mixed)
    if declared is not None:
        return DECLARED[declared].replaced(mixed=mixed)
    if wholes.by_tensor(made) is None:
        raise _refused(UNKNOWN, targets[-1])
    found = {value.power for value in values}
    if {v.kind for v in values} <= {Kind.SAME, Kind.MEAN, Kind.DRAWN}:
        if len(found) == 1:
            return Value(Kind.MEAN, found.pop(), mixed=mixed, wholes=made)
        raise _refused(Value(Kind.MIXED), targets[-1])
    first, target = differing[0]
    if first.kind is Kind.RATIO and all(v == first for v, _ in differing):
        if len(differing) == len(values) or kinds.is_level(first):
            return first
    raise _refused(first if len(values) == 1 else Value(Kind.MIXED), target)


def _total(known: Values, target: tf.Tensor, given: tf.Tensor | None) -> Value:
    """Returns what the sum of a target is, weighed by what was given."""
    value = known.of(target)
    own = SAME if given is None else known.of(given)
    return kinds.made_of(_weighed(*kinds.alone([value, own])), [value, own])


def _weighed(value: Value, own: Value) -> Value:
    if value.kind is Kind.ROWS:
        power = 0.0
        if own.kind is Kind.ROWS:
            alike = ("axis", "order", "some")
            if any(getattr(own, name) != getattr(value, name) for name in alike):
                return UNKNOWN
            power = own.power
        elif own.kind is not Kind.SAME or own.power:
            return UNKNOWN
        return powers.reduced("Sum", value.replaced(power=value.power + power))
    if own.kind is Kind.SAME and not own.power:
        return value
    return multiplied(value, own)


def _of_gradient(op: tf.Operation) -> errors.ReplicatorError:
    return errors.UnsupportedError(
        errors.compose(
            f"{op.name} combines examples with a gradient by something that is no "
            "variable, which is one of the examples of a replica: a second step from "
            "weights that a first one made, say.",
            [f"at {errors.line_of(op)}"],
            "take gradients by variables, which are those of all examples; or write a "
            "step of Replicator, and reduce the gradients of each replica there.",
        )
    )


def _own_gradient(op: tf.Operation) -> errors.ReplicatorError:
    return errors.UnsupportedError(
        errors.compose(
            f"the loss is made of {op.name}, whose gradient is one of your own "
            "(tf.custom_gradient): on a part of the batch, it is not known to be that "
            "of the whole.",
            [f"at {errors.line_of(op)}"],
            "let it do to each example what depends on that example alone, and on "
            "variables and sums only by what is linear.",
        )
    )


def _refused(value: Value, target: tf.Tensor) -> errors.ReplicatorError:
    if value.kind is Kind.MIXED:
        what = (
            f"the loss {target.name} adds a sum over the examples to something "
            "that is none"
        )
    else:
        what = (
            f"the loss {target.name} is of the examples, and the graph does not tell "
            f"how: it is {value.said}"
        )
    return errors.UnsupportedError(
        errors.compose(
            f"{what}: no weight of a replica's gradient is known to make the sum of "
            "all replicas' that of one device.",
            [f"at {errors.line_of(target.op)}"],
            _WAY_OUT,
        )
    )


def not_found(variable: str, line: str) -> errors.ReplicatorError:
    """Returns the error for a gradient of which nobody knows what it is taken of."""
    return errors.UnsupportedError(
        errors.compose(
            f"a gradient of variable {variable} was not asked for by tf.gradients or "
            "GradientTape.gradient: what is differentiated, and so what the gradients "
            "of the replicas weigh, is not known.",
            [f"at {line}"],
            "differentiate a loss by tf.gradients, GradientTape.gradient or an "
            "optimizer's minimize.",
        )
    )


def no_whole(tensor: tf.Tensor) -> errors.ReplicatorError:
    """Returns the error for what is needed, and not known, of all examples."""
    return errors.UnsupportedError(
        errors.compose(
            f"{tensor.name} divides a loss, or is combined with each example; it "
            "differs between replicas, and is not known for all examples.",
            [f"at {errors.line_of(tensor.op)}"],
            _WAY_OUT,
        )
    )


def mixes(op: tf.Operation) -> str:
    """Returns the warning of an op that makes rows of more than their own example."""
    return (
        f"{op.name} ({errors.line_of(op)}) combines each example with what is computed "
        "of all examples that its replica has, as batch normalization does: on one "
        "device, that would be of the whole batch."
    )
