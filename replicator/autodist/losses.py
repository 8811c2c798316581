# SPDX-License-Identifier: Apache-2.0
"""What a loss is when the examples are split: what gradients of it are weighed by.

The sum of the replicas' gradients is to be the gradient of one device. A loss that is a
mean over a replica's examples counts by its share of them, one that is a sum counts as
it is, and one that is divided by another sum counts by its share of that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.autodist import flows
from replicator.autodist.kinds import Kind, scaled
from replicator.autodist.values import Values

DECLARED = {"mean": Kind.MEAN, "sum": Kind.SUM}
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_WAY_OUT = (
    "let tf.reduce_mean or tf.reduce_sum over the examples make it, be it divided by "
    'such a sum or by tf.shape(x)[0]; or say what it is, loss="mean" or loss="sum", '
    "to AutoDist.function or create_distributed_session."
)


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is differentiated.

    Attributes:
        kind: MEAN, SUM, RATIO, or SAME.
        over: What a RATIO is divided by.
    """

    kind: Kind
    over: tf.Tensor | None = None


def find(
    kinds: Values,
    targets: Sequence[tf.Tensor],
    given: Sequence[tf.Tensor | None],
    declared: str | None,
) -> Loss:
    """Returns what is differentiated.

    Args:
        kinds: Finds the kinds of what is in the graph.
        targets: What is differentiated, all of it added up.
        given: The gradients that were given of them; None where they are ones.
        declared: What the user says that it is, "mean" or "sum", if anything.

    Raises:
        UnsupportedError: No weight makes the gradients those of one device.
    """
    for target in targets:
        _warn_of_statistics(kinds, target)
    found = {
        kind: target
        for target, own in zip(targets, given, strict=True)
        for kind in [_kind(kinds, target, own)]
    }
    differing = set(found) - {Kind.SAME}
    if not differing:
        return Loss(Kind.SAME)
    if declared is not None:
        return Loss(DECLARED[declared])
    if differing <= {Kind.SUM, Kind.COUNT} and Kind.SAME not in found:
        return Loss(Kind.SUM)
    if differing <= {Kind.MEAN, Kind.DRAWN}:
        return Loss(Kind.MEAN)
    if differing == {Kind.RATIO}:
        over = kinds.denominator(found[Kind.RATIO])
        if over is not None and len(targets) == len(found) and not _trained(over):
            return Loss(Kind.RATIO, over)
    kind = next(iter(differing)) if len(found) == 1 else Kind.MIXED
    raise _refused(kind, found[next(iter(differing))])


def _kind(kinds: Values, target: tf.Tensor, given: tf.Tensor | None) -> Kind:
    """Returns the kind of the sum of a target, weighed by what was given."""
    kind = kinds.of(target)
    own = Kind.SAME if given is None else kinds.of(given)
    if kind is Kind.ROWS:
        degree = kinds.degree(target)
        if own is Kind.ROWS and given is not None:
            more = kinds.degree(given)
            degree = None if degree is None or more is None else degree + more
        elif own is not Kind.SAME:
            return Kind.UNKNOWN
        return _BY_DEGREE.get(degree, Kind.UNKNOWN)
    return kind if own is Kind.SAME else scaled("Mul", [kind, own])


_BY_DEGREE: dict[int | None, Kind] = {0: Kind.SUM, -1: Kind.MEAN}


def _trained(tensor: tf.Tensor) -> bool:
    """Whether a tensor depends on variables."""
    ops = flows.upstream([tensor], lambda op: False)
    return any(op.type in _READS for op in ops)


def _refused(kind: Kind, target: tf.Tensor) -> errors.ReplicatorError:
    if kind is Kind.MIXED:
        what = (
            f"the loss {target.name} adds a sum over the examples to something "
            "that is none"
        )
    else:
        said = "neither a mean over them nor a sum"
        what = (
            f"the loss {target.name} is of the examples, and the graph does not tell "
            f"how: it is {said if kind is Kind.UNKNOWN else kind.value}"
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


def _warn_of_statistics(kinds: Values, target: tf.Tensor) -> None:
    """Warns once of rows that are made of more than their own example."""
    op = kinds.mixed(target)
    if op is not None:
        logging.log_first_n(
            logging.WARNING,
            "%s (%s) combines each example with what is computed of all examples that "
            "its replica has, as batch normalization does: on one device, that would "
            "be of the whole batch.",
            1,
            op.name,
            errors.line_of(op),
        )
