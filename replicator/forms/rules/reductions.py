# SPDX-License-Identifier: Apache-2.0
"""Ops that reduce axes. Of a sharded axis, each replica reduces its own part."""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf

from replicator.forms.forms import REPLICATED, Fact, Partial, Sharded
from replicator.forms.rule import LOCAL, OpPlan, is_partial, passed_on, plan, rule
from replicator.forms.sizes import Summed, SumTo, axes_of, has_local, is_size
from replicator.graph.ir import shapes

_HOW = {
    **{"Sum": "sum", "Mean": "sum", "Max": "max", "Min": "min"},
    **{"Any": "any", "All": "all"},
}
# In which type TensorFlow adds up what it takes the mean of. Half precision would
# overflow in the sum, and in the number of elements.
_MEAN_IN = {tf.float16: tf.float32, tf.bfloat16: tf.float32}


@rule("Sum Max Min Any All Prod EuclideanNorm")
def reduction(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of reductions along a list of axes."""
    form, how = facts[0].form, _HOW.get(op.type)
    if isinstance(facts[1].numbers, SumTo):
        return _sum_to_sizes(op, facts)
    is_mean, dtype = op.type == "Mean", op.outputs[0].dtype
    if how and is_partial(facts[0], how) and not (is_mean and dtype.is_integer):
        return plan(op, [form], form)
    found = axes_of(op, facts[1])
    if not isinstance(form, Sharded) or found is None:
        return None
    if form.axis not in found:
        gone = 0 if op.get_attr("keep_dims") else sum(a < form.axis for a in found)
        return plan(op, [form], form.at(form.axis - gone))
    if is_mean:  # the remainders of integers' quotients would be lost
        build = functools.partial(_mean, along=found, form=form)
        return None if dtype.is_integer else plan(op, [form], Partial(), build=build)
    return plan(op, [form], Partial(how)) if how else None


def over_rows(op: tf.Operation, facts: list[Fact]) -> tuple[Sharded, list[int]] | None:
    """Returns the form and the axes of what is reduced over a sharded axis, or None."""
    form, found = facts[0].form, axes_of(op, facts[1])
    if not isinstance(form, Sharded) or form.axis not in (found or ()):
        return None
    return form, found or []


def _mean(
    replica: Any, op: tf.Operation, inputs: list[Any], along: list[int], form: Sharded
) -> list[tf.Tensor]:
    """Divides the replica's own sum by the number of elements on all."""
    x, dtype = inputs[0], op.outputs[0].dtype
    wide = tf.cast(x, _MEAN_IN.get(dtype, dtype))
    total = tf.reduce_sum(wide, along, op.get_attr("keep_dims"))
    count = tf.cast(elements_per_result(replica, x, form, along), total.dtype)
    return [tf.cast(total / count, dtype)]


def elements_per_result(
    replica: Any, x: tf.Tensor, form: Sharded, along: list[int]
) -> tf.Tensor:
    """Returns how many elements, of all replicas, are reduced to one: an int64 scalar.

    Args:
        replica: The replica that is being built.
        x: Its copy of what is reduced.
        form: Its form.
        along: The axes that are reduced, with the sharded one.
    """
    others = (
        shapes.size(x, axis) or tf.shape(x, tf.int64)[axis]
        for axis in along
        if axis != form.axis
    )
    return math.prod(others, start=tf.cast(replica.length(form, x), tf.int64))


def _sum_to_sizes(op: tf.Operation, facts: list[Fact]) -> OpPlan | None:
    """Returns the plan of the gradient of broadcasting.

    Reshape(Sum(gradient, BroadcastGradientArgs(...)), sizes): which axes are summed is
    in general known only when it runs. Whether the sharded one is among them follows
    from the sizes of the result. Until the Reshape, all axes are kept so that the
    sharded one keeps its place.
    """
    form, sums, rank = facts[0].form, facts[1].numbers, op.inputs[0].shape.rank
    if is_partial(facts[0], "sum"):
        return plan(op, [form], form)
    users = {user.type for user in op.outputs[0].consumers()} - {"Shape"}
    if not isinstance(form, Sharded) or rank is None or users != {"Reshape"}:
        return None
    if sums.is_none:
        return passed_on(op, Fact(form, Summed(rank, sums.sizes)))
    sizes = sums.sizes
    at = form.axis - (sums.axes - len(sizes))
    if at < 0 or (at < len(sizes) and sizes[at] == 1):
        made: Partial | Sharded = Partial()
    elif at >= len(sizes) or (is_size(sizes[at]) and sizes[at].layout is form.layout):
        made = form
    else:
        return None
    needs = [form, LOCAL if has_local(facts[1]) else REPLICATED]
    return OpPlan(needs, [Fact(made, Summed(rank))], build=_sum_and_keep)


def _sum_and_keep(replica: Any, op: tf.Operation, inputs: list[Any]) -> list[tf.Tensor]:
    return replica.stamp(op, inputs, keep_dims=True)
