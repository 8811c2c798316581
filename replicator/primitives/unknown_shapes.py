# SPDX-License-Identifier: Apache-2.0
"""Shapes that are unknown until the step runs are compared then, before they are used.

An op of the lowering would fail at them with a message about an op that nobody wrote,
or it would broadcast. Here an assertion fails in its place, which names the call, the
user's lines, the shapes and the way out, whichever way the step is run: what a session
fetches or a tf.function calls passes no code of ours that could say so afterwards.

What is known while the step is built was compared by matching, and gets no op.
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
_MOST = 254  # sizes that an error shows of one tensor, which has no more axes

# Is given the shape of each replica's tensor; returns what has to hold, bool scalars.
Conditions = Callable[[Sequence[tf.Tensor]], Iterable[tf.Tensor]]


def alike(
    matched: Matched, axis: int | None = None, split: int | None = None
) -> Matched:
    """Returns a communication whose operands wait until their shapes are compared.

    Args:
        matched: The communication.
        axis: Along which sizes may differ, from the end if negative; None: nowhere.
        split: Another axis that tensors of unknown rank must have.
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
        fix += " With axis=0, all_gather and gather take different numbers of rows."
    else:
        problem += f", not only along axis {axis}"
        fix = f"pass tensors that differ in their sizes along axis {axis} only."
    needed = axis if split is None else split
    unranked = needed is not None and any(x.shape.rank is None for x in column)
    if unranked:
        problem += f", or have no axis {needed}"

    def conditions(seen: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        along = []
        if unranked and needed is not None:
            along = [has_axis(shape, needed) for shape in seen]
        if axis is not None:
            seen = [without(shape, axis) for shape in seen]
        return [*equal(seen), *along]

    return check(matched, column, conditions, problem, fix)


def check(
    matched: Matched,
    tensors: Sequence[tf.Tensor],
    conditions: Conditions,
    problem: str,
    fix: str,
    who: Sequence[int] | None = None,
    also: Sequence[tf.Tensor] = (),
) -> list[tf.Tensor]:
    """Returns tensors that wait until something has been found to hold.

    Args:
        matched: The communication.
        tensors: Of its participants, one each.
        conditions: Returns what has to hold of their shapes.
        problem: What is wrong otherwise.
        fix: What to do about it.
        who: Whose the tensors are, by their places; all participants', unless given.
        also: What an error shows behind the shapes: an int vector of each.
    """
    places = range(len(tensors)) if who is None else who
    calls = [matched.calls[n] for n in places]
    devices = [matched.devices[n] for n in places]
    seen = []
    for x, device in zip(tensors, devices, strict=True):
        with tf.device(device):
            seen.append(shapes.when_run(x))
    of = f"shapes{' and splits' if also else ''} on {_replicas(calls)}:"
    said = [f"{calls[0].primitive}: {problem}.", *_sites(matched.calls), of]
    with tf.device(hosts.cpu_of(matched.devices[0])):
        needs = list(conditions(seen))
        if not needs:  # of one replica alone
            return list(tensors)
        asserted = fail_unless(needs, said, [*seen, *also], fix)
    waiting = []
    for x, device in zip(tensors, devices, strict=True):
        with tf.device(device), tf.control_dependencies([asserted]):
            waiting.append(tf.identity(x))
    return waiting


def check_own(
    primitive: str,
    tensors: Sequence[tf.Tensor],
    conditions: Conditions,
    problem: str,
    shown: str,
    fix: str,
    seen: Sequence[tf.Tensor] | None = None,
) -> list[tf.Tensor]:
    """Returns tensors of the replica being built that wait until something holds.

    Args:
        primitive: What is called with them.
        tensors: They.
        conditions: Returns what has to hold of what is seen.
        problem: What is wrong otherwise.
        shown: What it is that is seen.
        fix: What to do about it.
        seen: Int vectors; the shapes of the tensors, unless given.
    """
    replica, line = context.require(primitive), errors.user_line()
    seen = [shapes.when_run(x) for x in tensors] if seen is None else seen
    said = [
        f"{primitive}{on_replica(replica)}: {problem}.",
        f"at {line}",
        f"{shown}:",
    ]
    with tf.device(hosts.cpu_of(replica.device)):
        asserted = fail_unless(list(conditions(seen)), said, seen, fix)
    with tf.control_dependencies([asserted]):
        return [tf.identity(x) for x in tensors]


def on_replica(replica: context.ReplicaContext) -> str:
    """Returns " on replica 1", say, to be written in the graph; "" if that is copied.

    A copy would say that it was the replica of which it is one.
    """
    named = replica.build.all_traced
    return f" on replica {replica.replica_id}" if named else ""


def of_shape(
    primitive: str, tensor: tf.Tensor, shape: Sequence[int], name: str, fix: str
) -> tf.Tensor:
    """Returns an argument that has a shape, or waits until it is found to have it.

    Args:
        primitive: What is called with it.
        tensor: The argument, whose static shape may be that one.
        shape: Its shape.
        name: What it is called.
        fix: What to pass in its place.
    """
    if is_known(tensor):
        return tensor
    (checked,) = check_own(
        primitive,
        [tensor],
        lambda seen: fits(seen[0], tuple(shape)),
        f"was given {name} of another shape than {list(shape)}",
        f"shape of {name}",
        fix,
    )
    checked.set_shape(shape)
    return checked


def fail_unless(
    conditions: Sequence[tf.Tensor],
    said: Sequence[str],
    seen: Sequence[tf.Tensor],
    fix: str,
) -> tf.Operation:
    """Returns an op that fails unless all conditions hold; to be put on a CPU.

    Args:
        conditions: Bool scalars, at least one.
        said: What is wrong if one does not; the last line says what `seen` is.
        seen: Int vectors, which the error shows.
        fix: What to do about it.
    """
    return tf.raw_ops.Assert(
        condition=tf.reduce_all(tf.stack(conditions)),
        data=[*said, *seen, f"Fix: {fix}"],
        summarize=_MOST,
    )


def _sites(calls: Sequence[Call]) -> list[str]:
    """Returns a line for each text of calls, which says who made such a call."""
    of: dict[str, list[Call]] = {}
    for call in calls:
        of.setdefault(str(call), []).append(call)
    return [f"{_replicas(own)}: {text}" for text, own in of.items()]


def _replicas(calls: Sequence[Call]) -> str:
    ids = ", ".join(str(call.replica_id) for call in calls)
    return f"replica{'s' if len(calls) > 1 else ''} {ids}"


# --- What has to hold -----------------------------------------------------------------


def is_known(tensor: tf.Tensor, axis: int | None = None) -> bool:
    """Whether a tensor's shape is known while the step is built, but for one axis."""
    known = shapes.static(tensor)
    if known is None or axis is None:
        return known is not None and None not in known
    rank = len(known)
    rest = [size for k, size in enumerate(known) if k not in (axis, axis + rank)]
    return None not in rest


def is_known_to_fit(tensor: tf.Tensor, spec: Shape) -> bool:
    """Whether all that a static shape says is known of a tensor, and was compared."""
    if spec is None:
        return True
    known = shapes.static(tensor)
    return known is not None and all(
        wanted is None or size is not None
        for size, wanted in zip(known, spec, strict=True)
    )


def equal(seen: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns whether each of some vectors is the first one; sizes may differ."""
    return [_same(seen[0], other) for other in seen[1:]]


def _same(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    # Not by one comparison, which would broadcast, or fail by a text of its own.
    equal = tf.raw_ops.Equal(x=one, y=other, incompatible_shape_error=False)
    return tf.reduce_all(equal) & tf.equal(tf.size(one), tf.size(other))


def without(shape: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns a shape that says nothing of the size along an axis."""
    rank = tf.size(shape)
    where = axis if axis >= 0 else axis + rank
    return tf.where(tf.equal(tf.range(rank), where), -1, shape)


def size_along(shape: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the size along an axis; 0 where there is none."""
    rank = tf.size(shape)
    where = axis if axis >= 0 else axis + rank
    return tf.reduce_sum(tf.where(tf.equal(tf.range(rank), where), shape, 0))


def has_axis(shape: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns whether there is such an axis."""
    return tf.size(shape) > (axis if axis >= 0 else -axis - 1)


def fits(shape: tf.Tensor, spec: Shape) -> list[tf.Tensor]:
    """Returns what has to hold for a shape to be as a static one says."""
    if spec is None:
        return []
    wanted = tf.constant([-1 if size is None else size for size in spec], tf.int32)
    free = tf.constant([size is None for size in spec], tf.bool)
    equal = tf.raw_ops.Equal(x=shape, y=wanted, incompatible_shape_error=False)
    return [tf.equal(tf.size(shape), len(spec)), tf.reduce_all(equal | free)]
