# SPDX-License-Identifier: Apache-2.0
"""Infers how losses depend on the split of examples, and so what gradients weigh.

The replicas' gradients must add up to the gradient of one device. A loss that is a mean
over a replica's examples counts by the replica's share of them, a loss that is a sum
counts fully, and a loss divided by something else counts by the replica's share of the
divisor.
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
    "compute it by tf.reduce_mean or tf.reduce_sum over the examples, if need be "
    "divided by a value that depends on no variable; or declare it: pass "
    'loss="mean" or loss="sum" to AutoDist.function or create_distributed_session.'
)


def find(
    known: Values,
    targets: Sequence[tf.Tensor],
    given: Sequence[tf.Tensor | None],
    declared: str | None,
) -> Value:
    """Returns the Value of a loss: the same on all replicas, a mean, a sum or a ratio.

    Args:
        known: Infers Values of the graph.
        targets: The tensors that are differentiated; the loss is their sum.
        given: The initial gradient of each target; None for ones.
        declared: What the user declares the loss to be, "mean" or "sum"; None if
            nothing.

    Raises:
        UnsupportedError: No weight makes the gradients those of one device.
    """
    custom_gradient = known.not_kept(targets)
    if custom_gradient is not None:
        raise _own_gradient(custom_gradient)
    values = [_total(known, t, g) for t, g in zip(targets, given, strict=True)]
    wholes_needed = frozenset[wholes.Whole]().union(*(v.wholes for v in values))
    differing = [
        (value, target)
        for value, target in zip(values, targets, strict=True)
        if kinds.alone([value])[0].replaced(by_value=False) != SAME
    ]
    if not differing and not wholes_needed:
        return SAME
    mixed = next((v.mixed for v, _ in differing if v.mixed is not None), None)
    if mixed is not None and known.follows_gradient(mixed):
        raise _of_gradient(mixed)
    if declared is not None:
        return DECLARED[declared].replaced(mixed=mixed)
    if wholes.by_tensor(wholes_needed) is None:
        raise _refused(UNKNOWN, targets[-1])
    powers_of_n = {value.power for value in values}
    if {v.kind for v in values} <= {Kind.SAME, Kind.MEAN, Kind.DRAWN}:
        if len(powers_of_n) == 1:
            return Value(
                Kind.MEAN, powers_of_n.pop(), mixed=mixed, wholes=wholes_needed
            )
        raise _refused(Value(Kind.MIXED), targets[-1])
    first, target = differing[0]
    if first.kind is Kind.RATIO and all(v == first for v, _ in differing):
        if len(differing) == len(values) or kinds.is_level(first):
            return first
    raise _refused(first if len(values) == 1 else Value(Kind.MIXED), target)


def _total(known: Values, target: tf.Tensor, given: tf.Tensor | None) -> Value:
    """Returns the Value of the sum of a target, weighted by its initial gradient."""
    value = known.of(target)
    initial = SAME if given is None else known.of(given)
    return kinds.made_of(_weighed(*kinds.alone([value, initial])), [value, initial])


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
            f"{op.name} combines examples with a gradient with respect to a tensor "
            "that is not a variable; that gradient covers one replica's examples only "
            "(a second step from weights that a first one computed, for example).",
            [f"at {errors.line_of(op)}"],
            "take gradients with respect to variables, which cover all examples; or "
            "write a step for Replicator, and reduce each replica's gradients there.",
        )
    )


def _own_gradient(op: tf.Operation) -> errors.ReplicatorError:
    return errors.UnsupportedError(
        errors.compose(
            f"the loss is computed from {op.name}, which has a custom gradient "
            "(tf.custom_gradient): on parts of the batch, it may differ from that of "
            "the whole.",
            [f"at {errors.line_of(op)}"],
            "have it treat each example by itself, and depend on variables and sums "
            "only linearly.",
        )
    )


def _refused(value: Value, target: tf.Tensor) -> errors.ReplicatorError:
    if value.kind is Kind.MIXED:
        problem = (
            f"the loss {target.name} adds a sum over the examples to something "
            "that is not one"
        )
    else:
        problem = (
            f"the graph does not show how the loss {target.name} combines the "
            f"examples: it is {value.said}"
        )
    return errors.UnsupportedError(
        errors.compose(
            f"{problem}. So no weights are known with which the replicas' gradients "
            "add up to that of one device.",
            [f"at {errors.line_of(target.op)}"],
            _WAY_OUT,
        )
    )


def not_found(variable: str, line: str) -> errors.ReplicatorError:
    """Returns the error for a gradient whose loss is unknown.

    Args:
        variable: The variable's name, if it is known.
        line: The user's line.
    """
    of = f"variable {variable}" if variable else "a variable"
    return errors.UnsupportedError(
        errors.compose(
            f"a gradient of {of} was not computed by tf.gradients or "
            "GradientTape.gradient: what is differentiated is unknown, and so are the "
            "weights of the replicas' gradients.",
            [f"at {line}"],
            "differentiate a loss with tf.gradients, GradientTape.gradient or an "
            "optimizer's minimize.",
        )
    )


def no_whole(tensor: tf.Tensor) -> errors.ReplicatorError:
    """Returns the error for a value that is needed, but unknown, for all examples."""
    return errors.UnsupportedError(
        errors.compose(
            f"{tensor.name} divides a loss, or is combined with each example; it "
            "differs between replicas, and its value for all examples is unknown.",
            [f"at {errors.line_of(tensor.op)}"],
            _WAY_OUT,
        )
    )


def mixes(op: tf.Operation) -> str:
    """Returns the warning for an op that makes rows depend on other examples."""
    return (
        f"{op.name} ({errors.line_of(op)}) combines each example with a value computed "
        "from all examples of its replica, as batch normalization does: on one device, "
        "it would be computed from the whole batch."
    )
