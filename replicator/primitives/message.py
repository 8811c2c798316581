# SPDX-License-Identifier: Apache-2.0
"""send and recv: a message, which one replica hands to another.

Meaning: the n-th `recv` from a source, under a tag, gives the n-th value that this
source sends to the calling replica under the tag. A send waits for nobody. Dual: the
gradient of what was received is sent back. Lowering: the destination reads the source's
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import arguments, context, errors
from replicator.graph.ir.placeholder import Call, Facts, Placeholder, Value
from replicator.graph.ir.shapes import Shape
from replicator.graph.lowering.matched import Matched
from replicator.primitives import base, flows, unknown_shapes

SEND, RECV = Facts(end="sends"), Facts(end="receives")


def send(value: Any, destination: int, tag: int = 0) -> None:
    """Sends a value to another replica, which calls `recv`.

    This replica's loss does not depend on what the other one computes from it. For
    gradients to come back, differentiate `Replicator.linked(loss)`.

    Example:
        >>> def step_fn():
        ...     if repl.replica_id == 0:
        ...         repl.send(tf.constant([1.0, 2.0]), destination=1)
        ...         return tf.zeros([2])
        ...     return repl.recv(tf.TensorSpec([2]), source=0)
        >>> for x in repl.run(step_fn): print(x)
        tf.Tensor([0. 0.], shape=(2,), dtype=float32)
        tf.Tensor([1. 2.], shape=(2,), dtype=float32)

    Args:
        value: A nest of tensors of any dtype and shape.
        destination: The replica that receives it.
        tag: Tells messages between the same two replicas apart; a Python int, 0 or
            more. The n-th `recv` under a tag receives the n-th `send` under it.

    Raises:
        ArgumentError: There is no such replica, or it is the one that calls; a bad tag;
            or a leaf is no dense tensor.
        ContextError: Called outside a step.
        MismatchError: When the step is built: the destination does not receive it, or
            expects another dtype or shape.
        DeadlockError: When the step is built: replicas wait for one another.
    """
    replica = context.require("send")
    replica.build.refuse_copies("who sends")
    source = replica.replica_id
    _check("send", "destination", destination, tag)
    leaves = base.flatten(value, "send")
    if any(isinstance(leaf, tf.IndexedSlices) for leaf in leaves):
        raise base.bad_argument(
            "send", "cannot send IndexedSlices", "send their values and indices."
        )
    if leaves:
        route = {"source": source, "destination": destination, "tag": tag}
        _place("send", route, leaves, [Value.of(leaf) for leaf in leaves])


def recv(spec: Any, source: int, tag: int = 0) -> Any:
    """Receives what another replica sends to this one.

    Example:
        >>> def step_fn():  # each replica sends its id to the other one
        ...     other = 1 - repl.replica_id
        ...     repl.send(repl.replica_id, destination=other)
        ...     return repl.recv(tf.TensorSpec([], tf.int32), source=other)
        >>> for x in repl.run(step_fn): print(x)
        tf.Tensor(1, shape=(), dtype=int32)
        tf.Tensor(0, shape=(), dtype=int32)

    Args:
        spec: What is sent: a nest of `tf.TensorSpec`, whose sizes may be None, or of
            tensors of the same dtypes and shapes. A tensor's values are not used and
            its gradient is zeros, but it puts the call on a tape that watches it, so
            that gradients go back to the source.
        source: The replica that sends.
        tag: As given to `send`.

    Returns:
        A nest like `spec` with the source's tensors, on this replica's device.

    Raises:
        ArgumentError: There is no such replica, or it is the one that calls; a bad tag;
            or a leaf of `spec` is neither a TensorSpec nor a dense tensor.
        ContextError: Called outside a step.
        MismatchError: When the step is built: the source does not send it, or sends
            another dtype or shape.
        DeadlockError: When the step is built: replicas wait for one another.
        tf.errors.InvalidArgumentError: When the step runs: a shape that was unknown
            differs from that of `spec`.
    """
    replica = context.require("recv")
    replica.build.refuse_copies("who receives")
    destination = replica.replica_id
    _check("recv", "source", source, tag)
    leaves = [_as_spec(leaf) for leaf in tf.nest.flatten(spec)]
    if not leaves:
        return spec
    received = _place(
        "recv",
        {"source": source, "destination": destination, "tag": tag},
        [leaf for leaf in leaves if not isinstance(leaf, tf.TensorSpec)],
        [Value.of(leaf) for leaf in leaves],
    )
    checked = [_alike(new, leaf) for new, leaf in zip(received, leaves, strict=True)]
    return tf.nest.pack_sequence_as(spec, checked)


def _check(what: str, name: str, other: Any, tag: Any) -> None:
    """Raises ArgumentError unless there is such another replica, and such a tag."""
    replica = context.require(what)
    base.check_replica(what, name, other, replica.num_replicas)
    if other == replica.replica_id:
        raise base.bad_argument(
            what,
            f"was given {name}={other}, which is itself",
            "keep the value in a Python variable.",
        )
    if not arguments.is_whole(tag):
        raise base.bad_argument(
            what,
            f"was given tag={errors.shown(tag)}",
            "a tag is a Python int, 0 or more, below 2**31.",
        )


def _as_spec(leaf: Any) -> tf.TensorSpec | tf.Tensor:
    """Returns what says what is to come: a leaf as it is, or as a tensor."""
    if isinstance(leaf, tf.TensorSpec):
        return leaf
    (tensor,) = base.flatten(leaf, "recv")
    if isinstance(tensor, tf.IndexedSlices):
        raise base.bad_argument(
            "recv", "cannot receive IndexedSlices", "receive their values and indices."
        )
    return tensor


def _alike(received: tf.Tensor, leaf: tf.TensorSpec | tf.Tensor) -> tf.Tensor:
    """Returns what was received; compares its shape with the tensor it shall be like.

    Only where that is unknown while the step is built: the lowering compares the rest.
    """
    if isinstance(leaf, tf.TensorSpec) or unknown_shapes.is_known(leaf):
        return received
    checked, _ = unknown_shapes.check_own(
        "recv",
        [received, leaf],
        unknown_shapes.equal,
        "what was sent differs in shape from the tensor that it should be like",
        "shapes of both",
        "pass a tensor of the shape that is sent, or a tf.TensorSpec of it.",
    )
    return checked


def _place(
    primitive: str,
    route: dict[str, int],
    operands: Sequence[tf.Tensor],
    values: Sequence[Value],
    of: Call | None = None,
) -> list[tf.Tensor]:
    """Puts one end of a message into the graph.

    Args:
        primitive: "send" or "recv".
        route: Its source, destination and tag.
        operands: First what is sent, if it is a send; then tensors that only put the
            call on the tapes that watch them.
        values: What is sent.
        of: Inside a gradient: the call that is differentiated.

    Returns:
        What is received, if it is a recv.
    """
    sends = primitive == "send"
    source, destination = route["source"], route["destination"]
    context.require(primitive).build.messages = True
    return base.communicate(
        primitive,
        route,
        operands,
        results=[] if sends else values,
        agreed=values,
        of=of,
        group=sorted((source, destination)),
        channel=f"{source}>{destination}#{route['tag']}",
        receipt=sends,
    )


def send_gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Receives the gradients of what was sent, from the replica that it was sent to.

    What was sent is passed, so that the gradient can be differentiated once more.
    """
    del upstream  # that of the receipt, which says nothing
    count = len(placed.call.agreed)
    flowing = flows.places(placed.operands[:count])
    sent = [placed.operands[k] for k in flowing]
    back = _answer("recv", placed, sent, sent)
    return flows.spread(back, flowing, len(placed.operands))


def recv_gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Sends the gradients of what was received back to where it came from.

    The operands go along, and are not sent: what has put the call on a tape does the
    same for the gradient, be it a constant. Their own gradients, zeros, depend on the
    receipt, so that second derivatives come back.
    """
    flowing = [d for d in upstream if flows.is_differentiable(d)]
    if not flowing:
        return [None] * len(placed.operands)
    _answer("send", placed, [*flowing, *placed.operands], flowing)
    receipt = context.require("recv").receipts[-1]
    return [
        tf.zeros_like(tensor) + tf.cast(receipt, tensor.dtype)
        if flows.is_differentiable(tensor)
        else None
        for tensor in placed.operands
    ]


def _answer(
    primitive: str,
    placed: Placeholder,
    operands: Sequence[tf.Tensor],
    like: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Places the message that goes the other way, unless there is nothing to send."""
    route = placed.call.options
    back = {**route, "source": route["destination"], "destination": route["source"]}
    values = [Value.of(tensor) for tensor in like]
    return _place(primitive, back, operands, values, of=placed.call) if like else []


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Hands the source's tensors to the destination. Moves bytes(value)."""
    ends = {call.primitive: n for n, call in enumerate(matched.calls)}
    spec = matched.calls[ends["recv"]].agreed
    sent = matched.operands[ends["send"]][: len(spec)]
    with tf.device(matched.devices[ends["recv"]]):
        received = [
            _as_expected(matched, ends["send"], tensor, value.shape)
            for tensor, value in zip(sent, spec, strict=True)
        ]
    return [received if n == ends["recv"] else [] for n in range(len(ends))]


def _as_expected(
    matched: Matched, source: int, sent: tf.Tensor, spec: Shape
) -> tf.Tensor:
    """Returns what was sent, compared with what is to come."""
    if not unknown_shapes.is_known_to_fit(sent, spec):
        (sent,) = unknown_shapes.check(
            matched,
            [sent],
            lambda seen: unknown_shapes.fits(seen[0], spec),
            "what was sent is not of the shape that recv is told",
            "pass recv a tf.TensorSpec of the shape that is sent; None is any size.",
            [source],
        )
        sent.set_shape(spec)
    return tf.identity(sent)
