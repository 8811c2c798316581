# SPDX-License-Identifier: Apache-2.0
"""send and recv: a message from one replica to another.

Meaning: the n-th `recv` from a source under a tag returns the n-th value that the
source sends to the calling replica under that tag. A send never waits. Dual: the
gradient of the received value is sent back. Lowering: the destination reads the
source's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import arguments, context, errors
from replicator.graph.ir.placeholder import Call, Placeholder, PrimitiveFacts, Value
from replicator.graph.ir.shapes import Shape
from replicator.graph.lowering.matched import Matched
from replicator.primitives import base, flows, unknown_shapes

SEND, RECV = PrimitiveFacts(end="sends"), PrimitiveFacts(end="receives")


def send(value: Any, destination: int, tag: int = 0) -> None:
    """Sends a value to another replica, which calls `recv`.

    This replica's loss does not depend on what the other replica computes from the
    value. For gradients to come back, differentiate `Replicator.linked(loss)`.

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
        ArgumentError: `destination` does not exist or is the calling replica; the tag
            is invalid; or a leaf is not a dense tensor.
        ContextError: Called outside a step.
        MismatchError: When the step is built: the destination does not receive the
            message, or expects another dtype or shape.
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
    """Receives a value that another replica sends to this one.

    Example:
        >>> def step_fn():  # each replica sends its id to the other one
        ...     other = 1 - repl.replica_id
        ...     repl.send(repl.replica_id, destination=other)
        ...     return repl.recv(tf.TensorSpec([], tf.int32), source=other)
        >>> for x in repl.run(step_fn): print(x)
        tf.Tensor(1, shape=(), dtype=int32)
        tf.Tensor(0, shape=(), dtype=int32)

    Args:
        spec: The dtypes and shapes of the message: a nest of `tf.TensorSpec`, whose
            sizes may be None, or of tensors. A tensor's values are not used and its
            gradient is zeros, but a tape that watches it records the call, so that
            gradients go back to the source.
        source: The replica that sends.
        tag: The tag passed to `send`.

    Returns:
        A nest like `spec` with the source's tensors, on this replica's device.

    Raises:
        ArgumentError: `source` does not exist or is the calling replica; the tag is
            invalid; or a leaf of `spec` is neither a TensorSpec nor a dense tensor.
        ContextError: Called outside a step.
        MismatchError: When the step is built: the source does not send the message, or
            sends another dtype or shape.
        DeadlockError: When the step is built: replicas wait for one another.
        tf.errors.InvalidArgumentError: When the step runs: a shape that was statically
            unknown differs from that of `spec`.
    """
    replica = context.require("recv")
    replica.build.refuse_copies("who receives")
    destination = replica.replica_id
    _check("recv", "source", source, tag)
    leaves = [_as_spec(leaf) for leaf in base.flat(spec, "recv")]
    if not leaves:
        return spec
    received = _place(
        "recv",
        {"source": source, "destination": destination, "tag": tag},
        [leaf for leaf in leaves if not isinstance(leaf, tf.TensorSpec)],
        [Value.of(leaf) for leaf in leaves],
    )
    checked = [
        _checked_shape(tensor, leaf)
        for tensor, leaf in zip(received, leaves, strict=True)
    ]
    return tf.nest.pack_sequence_as(spec, checked)


def _check(what: str, name: str, other: Any, tag: Any) -> None:
    """Raises ArgumentError unless `other` is another replica and the tag is valid."""
    replica = context.require(what)
    base.check_replica(what, name, other, replica.num_replicas)
    if other == replica.replica_id:
        raise base.bad_argument(
            what,
            f"was given {name}={other}, which is the replica itself",
            "keep the value in a Python variable.",
        )
    if not arguments.is_whole(tag):
        raise base.bad_argument(
            what,
            f"was given tag={errors.repr_of(tag)}",
            "a tag is a Python int, 0 or more, below 2**31.",
        )


def _as_spec(leaf: Any) -> tf.TensorSpec | tf.Tensor:
    """Returns a leaf of recv's `spec`: a TensorSpec as it is, or else a tensor."""
    if isinstance(leaf, tf.TensorSpec):
        return leaf
    (tensor,) = base.flatten(leaf, "recv")
    if isinstance(tensor, tf.IndexedSlices):
        raise base.bad_argument(
            "recv", "cannot receive IndexedSlices", "receive their values and indices."
        )
    return tensor


def _checked_shape(received: tf.Tensor, leaf: tf.TensorSpec | tf.Tensor) -> tf.Tensor:
    """Checks the received tensor at run time against the shape of `leaf`.

    Adds a check only if the leaf is a tensor whose shape is unknown while the step is
    built; the lowering checks everything else.
    """
    if isinstance(leaf, tf.TensorSpec) or unknown_shapes.is_known(leaf):
        return received
    checked, _ = unknown_shapes.check_local(
        "recv",
        [received, leaf],
        unknown_shapes.equal,
        "the tensor that was sent differs in shape from the one passed to recv",
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
        operands: For a send, first the tensors to send. Trailing operands are never
            sent; they only make the tapes that watch them record the call.
        values: Dtype and static shape of the tensors to send.
        of: Inside a gradient: the call being differentiated.

    Returns:
        The received tensors, for a recv.
    """
    sends = primitive == "send"
    source, destination = route["source"], route["destination"]
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
    """Receives the gradients of the sent tensors from the destination.

    The sent tensors are operands of this recv, so that it can itself be differentiated.
    """
    del upstream  # the gradient of the receipt, which carries no information
    count = len(placed.call.agreed)
    flowing = flows.places(placed.operands[:count])
    sent = [placed.operands[k] for k in flowing]
    gradients = _answer("recv", placed, sent, sent)
    return flows.spread(gradients, flowing, len(placed.operands))


def recv_gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Sends the gradients of the received tensors back to the source.

    The operands follow them but are never sent: they make the tape that recorded the
    call record the gradient too, even if that is a constant. Their own gradients are
    zeros that depend on the receipt, so that second derivatives come back.
    """
    flowing = [d for d in upstream if flows.is_differentiable(d)]
    if not flowing:
        return [None] * len(placed.operands)
    _answer("send", placed, [*flowing, *placed.operands], flowing)
    receipt = flows.last_receipt("recv")
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
    """Places the message in the reverse direction, unless it would be empty."""
    route = placed.call.options
    reverse = {**route, "source": route["destination"], "destination": route["source"]}
    values = [Value.of(tensor) for tensor in like]
    return _place(primitive, reverse, operands, values, of=placed.call) if like else []


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Passes the source's tensors to the destination. Moves bytes(value)."""
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
    """Returns the sent tensor, checked at run time against the shape recv expects."""
    if not unknown_shapes.is_known_to_fit(sent, spec):
        (sent,) = unknown_shapes.check(
            matched,
            [sent],
            lambda vectors: unknown_shapes.fits(vectors[0], spec),
            "the tensor that was sent does not have the shape that recv was given",
            "pass recv a tf.TensorSpec of the shape that is sent; None is any size.",
            [source],
        )
        sent.set_shape(spec)
    return tf.identity(sent)
