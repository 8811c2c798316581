# SPDX-License-Identifier: Apache-2.0
"""Batch normalization, and means, with the statistics of the whole batch.

One message forward and one backward, of two numbers per channel each. The statistics of
a replica's part are computed around its own mean, and those of all parts combined as
sums of squares in float64: of float32 values, the variance is as accurate as on one
device, even where it is much smaller than the square of the mean.

Where statistics are each replica's own (local.py), fused ops normalize each part by
its own, without a message. What they return for moving averages are then means over
the replicas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator.forms.forms import REPLICATED, Fact, Form, Partial, Sharded
from replicator.forms.rule import UNUSED, OpPlan, plan, replicated, rule
from replicator.forms.rules.reductions import elements_per_result, over_rows, reduction
from replicator.forms.values import OfSum

_Tensors = list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Saved:
    """Who computed what a fused op saves for its gradient, as `Fact.numbers` of that.

    Attributes:
        how: "whole": the moments of the whole batch, by `_normalize`; "own": each
            replica's op those of its part; "native": the op those of one device.
        form: The form of what was normalized.
    """

    how: str
    form: Form


# Means, of which variances may be made.


@rule("Mean")
def mean(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of Mean. A mean and the variance around it are one message.

    They are found as tf.nn.moments makes them, and with it the layers of Keras and
    Sonnet: Mean(SquaredDifference(x, StopGradient(Mean(x)))).
    """
    found, pair = over_rows(op, facts), moments_of(op)
    if pair is None or found is None:
        return reduction(op, facts, scope)
    if op is pair[1]:
        center = pair[0].outputs[0]
        build = functools.partial(_variance, mean=center)
        return plan(op, [UNUSED] * 2, REPLICATED, build=build, reads=[center])
    form, along = found
    build = functools.partial(_mean, along=along, form=form)
    return plan(op, [form, UNUSED], REPLICATED, build=build)


def moments_of(op: tf.Operation) -> tuple[tf.Operation, tf.Operation] | None:
    """Returns the ops of a mean and of the variance around it, given either one."""
    users = [op]
    for kind in ("StopGradient", "SquaredDifference", "Mean"):
        users = [u for x in users for u in x.outputs[0].consumers() if u.type == kind]
    for variance in (op, *users):
        mean = _center(variance)
        if mean is not None and op in (mean, variance):
            return mean, variance
    return None


def _center(op: tf.Operation) -> tf.Operation | None:
    """Returns the op of the mean around which an op is the variance, if it is one."""
    squares = op.inputs[0].op
    is_square = squares.type == "SquaredDifference"
    mean = up(squares.inputs[1], "StopGradient", "Mean") if is_square else None
    if mean is None or squares.inputs[0] is not mean.inputs[0]:
        return None
    every = [tf.get_static_value(one.inputs[1]) for one in (op, mean)]
    is_known = all(one is not None for one in every)
    if not is_known or not all(one.get_attr("keep_dims") for one in (op, mean)):
        return None
    is_float = op.outputs[0].dtype in (tf.float32, tf.float64)
    return mean if is_float and {*every[0].flat} == {*every[1].flat} else None


def up(tensor: tf.Tensor, *kinds: str) -> tf.Operation | None:
    """Returns the last of ops of these types, each the first input of the former."""
    for k, kind in enumerate(kinds):
        op = tensor.op
        if op.type != kind:
            return None
        if k < len(kinds) - 1:
            tensor = op.inputs[0]
    return op


def _mean(
    replica: Any, op: tf.Operation, inputs: _Tensors, along: list[int], form: Sharded
) -> list[Any]:
    x = inputs[0]
    own, rows = own_mean(x, along)
    squares = tf.reduce_sum(tf.math.squared_difference(x, own), along, True)
    count = elements_per_result(replica, x, form, along)
    finish = functools.partial(_finish, count=count, dtype=x.dtype)
    return [OfSum(replica, _summand(own, squares, rows), finish)]


def _variance(
    replica: Any, op: tf.Operation, inputs: _Tensors, mean: tf.Tensor
) -> _Tensors:
    # No other op stands for that of the mean: see twins.py.
    return [replica.value(mean).values[1]]


def own_mean(x: tf.Tensor, along: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean of a replica's elements, 0 of none, and how many they are."""
    count = tf.cast(_count(x, along), x.dtype)
    return tf.reduce_sum(x, along, True) / tf.maximum(count, 1), count


def _count(x: tf.Tensor, along: Sequence[int]) -> tf.Tensor:
    return tf.reduce_prod(tf.gather(tf.shape(x, tf.int64), list(along)))


def _summand(own: tf.Tensor, squares: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns what replicas add up: the sums of their elements and of the squares.

    Args:
        own: The mean of this replica's elements.
        squares: The sum of the squares of their distances from that.
        rows: How many they are.
    """
    own, squares, rows = (tf.cast(x, tf.float64) for x in (own, squares, rows))
    return tf.stack([rows * own, squares + rows * own**2])


def _finish(total: tf.Tensor, count: tf.Tensor, dtype: tf.DType) -> _Tensors:
    """Returns the mean and the variance of all replicas' elements.

    Args:
        total: The sum of what `_summand` returns.
        count: How many elements there are.
        dtype: Of the results.
    """
    first, second = tf.unstack(total)
    count = tf.cast(count, tf.float64)
    mean = first / count
    # NaN where there are no elements, as on one device.
    variance = tf.maximum(second / count - mean**2, tf.zeros_like(mean))
    return [tf.cast(mean, dtype), tf.cast(variance, dtype)]


# Fused ops.


@rule("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3")
def fused(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """The rule of FusedBatchNorm, in all versions."""
    form = facts[0].form
    if not isinstance(form, Sharded) or form.axis not in _axes(op):
        return plan(op, [], _makes(op, REPLICATED, "native"))
    if not op.get_attr("is_training"):
        return plan(op, [form], _makes(op, form, "native"), build=_infer)
    if scope.own is not None and not _is_only_saved(op):
        scope.own.missed[op] = None
    elif scope.own is not None:
        makes = _makes(op, form, "own")
        makes[1:3] = [Fact(Partial()), Fact(Partial())]
        build = functools.partial(_normalize_own, form=form)
        return plan(op, [form], makes, build=build)
    build = functools.partial(_normalize, form=form)
    return plan(op, [form], _makes(op, form, "whole"), build=build)


def _makes(op: tf.Operation, form: Form, how: str) -> list[Fact]:
    """Returns what is known of the outputs: values, two moments, and what is saved."""
    saved = Fact(REPLICATED, Saved(how, form))
    return [Fact(form), Fact(), Fact(), *[saved] * (len(op.outputs) - 3)]


def _is_only_saved(op: tf.Operation) -> bool:
    """Whether only gradients use what an op saves for them, in the same graph.

    And not gradients of these: TensorFlow computes the statistics anew there, by Mean
    of the gradient that comes in and of x, behind Transpose where channels come first.
    """
    users = {user for out in op.outputs[3:] for user in out.consumers()}
    returned = getattr(op.graph, "outputs", [])
    is_returned = any(out is one for out in op.outputs[3:] for one in returned)
    # As tf.gradients makes for outputs without one.
    types = {user.type for user in users} - {"ZerosLike", "Shape"}
    gradients = [user for user in users if "BatchNormGrad" in user.type]
    others = {one.type for user in gradients for one in user.inputs[0].consumers()}
    is_twice = bool(others & {"Mean", "Transpose"})
    are_gradients = all("BatchNormGrad" in one for one in types)
    return are_gradients and not is_returned and not is_twice


def _axes(op: tf.Operation) -> list[int]:
    """Returns the axes of an image but the channels."""
    rank = op.inputs[0].shape.rank
    if rank is None:
        return []
    channel = 1 if op.get_attr("data_format").startswith(b"NC") else rank - 1
    return [axis for axis in range(rank) if axis != channel]


def _kernel(op: tf.Operation) -> Callable[..., Any]:
    """Returns what adds a forward op, given that or its gradient."""
    kernel = getattr(tf.raw_ops, op.type.replace("Grad", ""))
    data_format, epsilon = op.get_attr("data_format").decode(), op.get_attr("epsilon")
    return functools.partial(kernel, epsilon=epsilon, data_format=data_format)


def _fused_infer(op: tf.Operation, *inputs: tf.Tensor) -> tf.Tensor:
    """Returns (x - mean) * scale / sqrt(variance + epsilon) + offset, by one kernel."""
    names = ("x", "scale", "offset", "mean", "variance")
    return _kernel(op)(**dict(zip(names, inputs, strict=True)), is_training=False)[0]


def _fused_train(op: tf.Operation, x: tf.Tensor, scale: tf.Tensor) -> Any:
    """Returns what the forward op makes: values, mean, variance, and what it saves."""
    empty = tf.zeros([0], scale.dtype)
    given = {"scale": scale, "offset": scale, "mean": empty, "variance": empty}
    return _kernel(op)(x=x, **given, is_training=True)


def _infer(replica: Any, op: tf.Operation, inputs: _Tensors) -> _Tensors:
    """Normalizes by given moments. Kernels return no moments for empty batches."""
    pair = [inputs[3], inputs[4]]
    return _padded(op, [_fused_infer(op, *inputs), *pair, *pair])


def _padded(op: tf.Operation, outputs: _Tensors) -> _Tensors:
    """Returns outputs, and empty tensors for those that only kernels use."""
    more = op.outputs[len(outputs) :]
    return [*outputs, *(tf.zeros([0], out.dtype) for out in more)]


def _normalize(
    replica: Any, op: tf.Operation, inputs: _Tensors, form: Sharded
) -> _Tensors:
    x, scale, offset, *old = inputs
    found, variance, count = _of_channels(replica, op, x, form)
    y = _fused_infer(op, x, scale, offset, found, variance)
    unbiased = variance * (count / tf.maximum(count - 1, 1))
    factor = op.get_attr("exponential_avg_factor")
    new = [found, unbiased]
    if factor != 1:
        new = [(1 - factor) * a + factor * b for a, b in zip(old, new, strict=True)]
    return _padded(op, [y, *new, found, variance])


def _of_channels(
    replica: Any, op: tf.Operation, x: tf.Tensor, form: Sharded
) -> _Tensors:
    """Returns the mean and variance per channel, and the number of elements of one.

    Those of the part are computed by the op's own kernel, which is faster than several
    ops, even though it normalizes, too.
    """
    scale, along = op.inputs[2].dtype, _axes(op)
    ones = tf.ones(op.inputs[2].shape, scale)
    _, own, unbiased, *_ = _fused_train(op, x, ones)
    rows = tf.cast(_count(x, along), scale)
    # Kernels return NaN for the moments of none, and may for the variance of one.
    own = tf.where(rows > 0, own, tf.zeros_like(own))
    squares = tf.where(rows > 1, unbiased * (rows - 1), tf.zeros_like(unbiased))
    count = elements_per_result(replica, x, form, along)
    (total,) = replica.sums([_summand(own, squares, rows)])
    return [*_finish(total, count, scale), tf.cast(count, scale)]


def _normalize_own(
    replica: Any, op: tf.Operation, inputs: _Tensors, form: Sharded
) -> _Tensors:
    """The same op on each replica, and its share of the mean over replicas."""
    y, mean, variance, *saved = replica.stamp(op, inputs)
    shares = [replica.share(one, form.layout) for one in (mean, variance)]
    return [y, *shares, *saved]


@rule("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3")
def fused_gradient(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """The rule of FusedBatchNormGrad, in all versions.

    Without training, it is linear. Else what the forward op saved is in a form that
    only it knows, and that differs between devices: statistics of unknown origin, as
    out of a list, are computed again.
    """
    form, saved = facts[1].form, facts[3].numbers
    is_training = op.get_attr("is_training")
    if not is_training and not isinstance(form, Sharded):
        form = facts[0].form
    if not isinstance(form, Sharded) or form.axis not in _axes(op):
        is_native = not is_training or saved == Saved("native", REPLICATED)
        return None if is_native else replicated(op, build=_again)
    rest = [Fact()] * (len(op.outputs) - 3)
    if not is_training or saved == Saved("own", form):
        sums = [Fact(Partial())] * 2
        return plan(op, [form, form], [Fact(form), *sums, *rest])
    moments = [REPLICATED if saved == Saved("whole", form) else UNUSED] * 2
    needs = [form, form, REPLICATED, *moments, *[UNUSED] * (len(op.inputs) - 5)]
    build = functools.partial(_backward, form=form)
    return plan(op, needs, [Fact(form), Fact(), Fact(), *rest], build=build)


def _again(replica: Any, op: tf.Operation, inputs: _Tensors) -> _Tensors:
    """Runs the forward op once more, for what it saves."""
    made = _fused_train(op, *inputs[1:3])
    return replica.stamp(op, [*inputs[:3], *made[3:]])


def _backward(
    replica: Any, op: tf.Operation, inputs: _Tensors, form: Sharded
) -> _Tensors:
    """The gradient of a constant mean and variance, less those of the two.

    dx = scale * r * (dy - sum(dy) / n - normal * sum(dy * normal) / n)
    where r = 1 / sqrt(variance + epsilon) and normal = (x - mean) * r.
    """
    dy, x, scale, found, variance, *_ = inputs
    if found is None:
        found, variance, count = _of_channels(replica, op, x, form)
    else:
        others = elements_per_result(replica, x, form, _axes(op))
        count = tf.cast(others, scale.dtype)
    empty = [tf.zeros([0], scale.dtype)] * (len(op.inputs) - 5)
    own = replica.stamp(op, [dy, x, scale, found, variance, *empty], is_training=False)
    by_scale, by_offset = tf.unstack(replica.sums([tf.stack(own[1:3])])[0])
    epsilon = op.get_attr("epsilon")
    root = tf.math.rsqrt(variance + epsilon)
    slope = scale * root * root * by_scale / count
    level = scale * root * by_offset / count
    one = tf.fill(tf.shape(variance), tf.constant(1 - epsilon, variance.dtype))
    less = _fused_infer(op, x, slope, level, found, one)
    return _padded(op, [own[0] - less, by_scale, by_offset])
