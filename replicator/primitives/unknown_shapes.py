# SPDX-License-Identifier: Apache-2.0
"""Run-time checks of shapes that are unknown while the step is built.

Without them, an op of the lowering would fail with a message about an op that nobody
wrote, or would broadcast. An assertion in the graph fails instead and names the call,
the user's lines, the shapes and the fix. It is in the graph because a session's fetch
or an enclosing tf.function runs no code of ours that could explain the failure.

Shapes that are known while the step is built are compared by matching and get no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from replicator import context, errors
from replicator.costs import hosts
from replicator.graph.ir import shapes
from replicator.graph.ir.placeholder import Call
from replicator.graph.ir.shapes import Shape
from replicator.graph.lowering.matched import Matched

ONE_SHAPE = "pass tensors of one shape on all replicas, padded for example."
_MOST = 254  # the most axes of a tensor: an error shows all of its sizes

# Takes the shape of each replica's tensor; returns the conditions, bool scalars.
Conditions = Callable[[Sequence[tf.Tensor]], Iterable[tf.Tensor]]


def check_alike(
    matched: Matched, axis: int | None = None, split: int | None = None
) -> Matched:
    """Checks at run time that the replicas' operands have the same shapes.

    Args:
        matched: The communication.
        axis: The axis along which sizes may differ, from the end if negative; None:
            sizes may not differ.
        split: Another axis that tensors of unknown rank must have.

    Returns:
        The communication, with operands that wait for the check.
    """
    columns = [
        _compared(matched, matched.column(k), axis, split)
        for k in range(len(matched.operands[0]))
    ]
    return matched.passing(list(zip(*columns, strict=True)))


def _compared(
    matched: Matched, column: list[tf.Tensor], axis: int | None, split: int | None
) -> list[tf.Tensor]:
    if all(is_known(x, axis) for x in column):
        return column
    problem, fix = "the tensors of the replicas differ in shape", ONE_SHAPE
    if axis is None:
        fix += " With axis=0, all_gather and gather accept different numbers of rows."
    else:
        problem += f", not only along axis {axis}"
        fix = f"pass tensors that differ in their sizes along axis {axis} only."
    needed = axis if split is None else split
    unranked = needed is not None and any(x.shape.rank is None for x in column)
    if unranked:
        problem += f", or have no axis {needed}"

    def conditions(vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        along = []
        if unranked and needed is not None:
            along = [has_axis(shape, needed) for shape in vectors]
        if axis is not None:
            vectors = [without(shape, axis) for shape in vectors]
        return [*equal(vectors), *along]

    return check(matched, column, conditions, problem, fix)


def check(
    matched: Matched,
    tensors: Sequence[tf.Tensor],
    conditions: Conditions,
    problem: str,
    fix: str,
    participants: Sequence[int] | None = None,
    extra: Sequence[tf.Tensor] = (),
) -> list[tf.Tensor]:
    """Checks conditions on the shapes of tensors at run time.

    Args:
        matched: The communication.
        tensors: One tensor per participant.
        conditions: Returns the conditions on the shapes.
        problem: What is wrong if a condition fails.
        fix: What to do about it.
        participants: The indices of the participants whose tensors these are; all by
            default.
        extra: Int vectors, one per tensor, that the error shows after the shapes.

    Returns:
        The tensors, which wait for the check.
    """
    indices = range(len(tensors)) if participants is None else participants
    calls = [matched.calls[n] for n in indices]
    devices = [matched.devices[n] for n in indices]
    vectors = []
    for x, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            vectors.append(shapes.when_run(x))
    of = f"shapes{' and splits' if extra else ''} on {_replicas(calls)}:"
    message = [f"{calls[0].primitive}: {problem}.", *_sites(matched.calls), of]
    with tf.device(hosts.cpu_of(matched.devices[0])):
        checks = list(conditions(vectors))
        if not checks:  # a single replica has nothing to compare
            return list(tensors)
        assertion = fail_unless(checks, message, [*vectors, *extra], fix)
    checked = []
    for x, device in zip(tensors, devices, strict=True):
        with tf.device(device), tf.control_dependencies([assertion]):
            checked.append(tf.identity(x))
    return checked


def check_local(
    primitive: str,
    tensors: Sequence[tf.Tensor],
    conditions: Conditions,
    problem: str,
    description: str,
    fix: str,
    vectors: Sequence[tf.Tensor] | None = None,
) -> list[tf.Tensor]:
    """Checks tensors of the replica being built at run time.

    Args:
        primitive: The name of the call.
        tensors: The tensors.
        conditions: Returns the conditions on `vectors`.
        problem: What is wrong if a condition fails.
        description: Describes `vectors`.
        fix: What to do about it.
        vectors: Int vectors; the shapes of the tensors by default.

    Returns:
        The tensors, which wait for the check.
    """
    replica, line = context.require(primitive), errors.user_line()
    vectors = [shapes.when_run(x) for x in tensors] if vectors is None else vectors
    message = [
        f"{primitive}{on_replica(replica)}: {problem}.",
        f"at {line}",
        f"{description}:",
    ]
    with tf.device(hosts.cpu_of(replica.device)):
        assertion = fail_unless(list(conditions(vectors)), message, vectors, fix)
    with tf.control_dependencies([assertion]):
        return [tf.identity(x) for x in tensors]


def on_replica(replica: context.ReplicaContext) -> str:
    """Returns e.g. " on replica 1" for a message in the graph; "" if it is copied.

    A copy would name the replica that it was copied from.
    """
    is_traced = replica.build.all_traced
    return f" on replica {replica.replica_id}" if is_traced else ""


def of_shape(
    primitive: str, tensor: tf.Tensor, shape: Sequence[int], name: str, fix: str
) -> tf.Tensor:
    """Returns an argument of a required shape, checked at run time if not static.

    Args:
        primitive: The name of the call.
        tensor: The argument; its static shape must be compatible with `shape`.
        shape: The required shape.
        name: The argument's name.
        fix: What to pass instead.
    """
    if is_known(tensor):
        return tensor
    (checked,) = check_local(
        primitive,
        [tensor],
        lambda vectors: fits(vectors[0], tuple(shape)),
        f"was given {name} whose shape is not {list(shape)}",
        f"shape of {name}",
        fix,
    )
    checked.set_shape(shape)
    return checked


def fail_unless(
    conditions: Sequence[tf.Tensor],
    message: Sequence[str],
    vectors: Sequence[tf.Tensor],
    fix: str,
) -> tf.Operation:
    """Returns an op that fails unless all conditions hold; to be placed on a CPU.

    Args:
        conditions: Bool scalars, at least one.
        message: The message; its last line describes `vectors`.
        vectors: Int vectors that the error shows.
        fix: What to do about it.
    """
    return tf.raw_ops.Assert(
        condition=tf.reduce_all(tf.stack(conditions)),
        data=[*message, *vectors, f"Fix: {fix}"],
        summarize=_MOST,
    )


def _sites(calls: Sequence[Call]) -> list[str]:
    """Returns one line per distinct call, naming the replicas that made it."""
    calls_by_text: dict[str, list[Call]] = {}
    for call in calls:
        calls_by_text.setdefault(str(call), []).append(call)
    return [
        f"{_replicas(same_calls)}: {text}" for text, same_calls in calls_by_text.items()
    ]


def _replicas(calls: Sequence[Call]) -> str:
    ids = ", ".join(str(call.replica_id) for call in calls)
    return f"replica{'s' if len(calls) > 1 else ''} {ids}"


# --- Conditions -----------------------------------------------------------------------


def is_known(tensor: tf.Tensor, axis: int | None = None) -> bool:
    """Whether a tensor's static shape is fully defined, except perhaps along `axis`."""
    static_shape = shapes.static(tensor)
    if static_shape is None or axis is None:
        return static_shape is not None and None not in static_shape
    rank = len(static_shape)
    rest = [size for k, size in enumerate(static_shape) if k not in (axis, axis + rank)]
    return None not in rest


def is_known_to_fit(tensor: tf.Tensor, spec: Shape) -> bool:
    """Whether a tensor's static shape has every size that `spec` has.

    Matching has compared the sizes already.
    """
    if spec is None:
        return True
    static_shape = shapes.static(tensor)
    return static_shape is not None and all(
        expected is None or size is not None
        for size, expected in zip(static_shape, spec, strict=True)
    )


def equal(vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Compares the first vector with each of the others; lengths may differ."""
    return [_same(vectors[0], other) for other in vectors[1:]]


def _same(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    # A plain comparison would broadcast, or fail with a message of its own.
    equal = tf.raw_ops.Equal(x=one, y=other, incompatible_shape_error=False)
    return tf.reduce_all(equal) & tf.equal(tf.size(one), tf.size(other))


def without(shape: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns a shape vector with the size along an axis replaced by -1."""
    rank = tf.size(shape)
    where = axis if axis >= 0 else axis + rank
    return tf.where(tf.equal(tf.range(rank), where), -1, shape)


def size_along(shape: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the size along an axis; 0 if the axis does not exist."""
    rank = tf.size(shape)
    where = axis if axis >= 0 else axis + rank
    return tf.reduce_sum(tf.where(tf.equal(tf.range(rank), where), shape, 0))


def has_axis(shape: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns whether the axis exists."""
    return tf.size(shape) > (axis if axis >= 0 else -axis - 1)


def fits(shape: tf.Tensor, spec: Shape) -> list[tf.Tensor]:
    """Returns the conditions for a shape vector to match a static shape."""
    if spec is None:
        return []
    expected = tf.constant([-1 if size is None else size for size in spec], tf.int32)
    free = tf.constant([size is None for size in spec], tf.bool)
    equal = tf.raw_ops.Equal(x=shape, y=expected, incompatible_shape_error=False)
    return [tf.equal(tf.size(shape), len(spec)), tf.reduce_all(equal | free)]
