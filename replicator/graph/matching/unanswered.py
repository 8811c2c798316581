# SPDX-License-Identifier: Apache-2.0
"""Answers by zeros where a backward pass asks for a gradient that is zero.

The sender of a message receives, in its backward pass, what the receiver makes of the
value there. Where that is nothing, the receiver's tape never comes to the message, and
nothing is sent back: the gradient is zero. Nothing is sent back either where a replica
was to differentiate and does not, which is an error. So zeros are the answer only where
it follows from the program that they are right:

- the receiver's tape watches the message, and no op makes anything of the value that
  could be differentiated, nor is it returned; or
- the receiver has differentiated through the message, but by another line, and takes a
  gradient by the line in question too: of a loss that does not depend on the message.

Runs once per build in which something is sent, before anything is matched; top level
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import Call, Placeholder
from replicator.graph.matching import control_flow


def answer(
    replicas: Sequence[Sequence[tf.Operation]],
    returned: Sequence[Any],
    replica_ids: Sequence[int],
) -> list[list[tf.Operation]]:
    """Takes questions out of the graph to which the answer is zero.

    Args:
        replicas: `replicas[n]` are the ops of `replica_ids[n]`, in build order.
        returned: `returned[n]` is what step_fn returned for it.
        replica_ids: The replicas.

    Returns:
        The ops of each replica without placeholders that were replaced by zeros.
    """
    sides = [
        _Side(ops, r, own)
        for r, ops, own in zip(replica_ids, replicas, returned, strict=True)
    ]
    gone: set[tf.Operation] = set()
    depth = 0
    while keys := {key for side in sides for key in side.sends(depth)}:
        for key in sorted(keys):
            gone |= _answer_message(sides, key)
        depth += 1
    return [[op for op in ops if op not in gone] for ops in replicas]


class _Side:
    """What one replica does."""

    def __init__(
        self, ops: Sequence[tf.Operation], replica_id: int, returned: Any
    ) -> None:
        sites = control_flow.find_sites(ops, replica_id)
        self.calls = {call.key: call for site in sites for call in site.calls}
        self.top = {s.call.key: s for s in sites if isinstance(s, Placeholder)}
        leaves = tf.nest.flatten(returned, expand_composites=True)
        self.results = {id(leaf) for leaf in leaves}

    def sends(self, depth: int) -> list[str]:
        """Returns the keys of what is sent at the top level."""
        return [
            key
            for key, site in self.top.items()
            if site.call.facts.end == "sends" and site.call.depth == depth
        ]

    def gradients(self, key: str) -> list[Call]:
        """Returns the calls of gradients of one call, in order."""
        own = [c for k, c in self.calls.items() if k.rpartition("/")[0] == key]
        return sorted(own, key=lambda call: int(call.key.rpartition("/")[2]))

    def below(self, key: str) -> list[str]:
        """Returns the keys of a call, its gradients, their gradients, and so on."""
        return [k for k in self.calls if k == key or k.startswith(key + "/")]


def _answer_message(sides: Sequence[_Side], key: str) -> set[tf.Operation]:
    """Answers what the sender of one message asks; returns what it has replaced."""
    ends = [side for side in sides if key in side.calls]
    sender = next(side for side in ends if side.calls[key].facts.end == "sends")
    receivers = [s for s in ends if s.calls[key].facts.end == "receives"]
    if not receivers or key not in receivers[0].top:
        return set()
    (receiver,) = receivers
    asked, answers = sender.gradients(key), receiver.gradients(key)
    if len(asked) <= len(answers) or not sender.top.keys() >= set(sender.below(key)):
        return set()
    if answers:
        extra = _asked_elsewhere(asked, answers, receiver)
    else:
        used = _is_used(receiver.top[key], receiver.results)
        extra = [] if used else asked
    gone = set()
    for call in extra:
        for old in sender.below(call.key):
            _replace_by_zeros(sender.top[old])
            gone.add(sender.top[old].op)
            del sender.top[old], sender.calls[old]
    if extra:
        _close_gaps(sender, key)
    return gone


def _asked_elsewhere(
    asked: Sequence[Call], answers: Sequence[Call], receiver: _Side
) -> list[Call]:
    """Returns what is asked where the receiver differentiates something else.

    The gradients of a message are told apart by the lines on which they are taken.
    Nothing is returned if they share one, or if the receiver takes no gradient there.
    """
    lines = [call.line for call in asked]
    answered = [call.line for call in answers]
    differentiates = {c.line for c in receiver.calls.values() if c.backward}
    if len(set(lines)) < len(lines) or not set(lines) <= differentiates:
        return []
    if [line for line in lines if line in answered] != answered:
        return []
    return [call for call in asked if call.line not in answered]


def _is_used(received: Placeholder, results: set[int]) -> bool:
    """Whether a gradient of what was received could be anything but zero.

    It is if an op makes something of it: that can be a loss, though nothing is made of
    that in turn. What a tape watches is no loss by itself, or the tape had come here.

    Args:
        received: A recv.
        results: The ids of the tensors that its replica returns.
    """
    if not received.call.watched:
        return True
    stack = [t for t in received.results if _flows(t)]
    while stack:
        tensor = stack.pop()
        if id(tensor) in results:
            return True
        for op in tensor.consumers():
            kind = kind_of(op)
            if kind.calls or op.type == placeholder.TYPE:
                return True
            if op.type in _SAME:
                stack += op.outputs
            elif op.type != "StopGradient" and any(map(_flows, op.outputs)):
                return True
            elif not op.outputs and op.type not in _SAYS:
                return True
    return False


_SAME = ("Identity", "EnsureShape", "PlaceholderWithDefault")
_SAYS = ("Assert", "PrintV2")  # what an op without results may do with a value


def _flows(tensor: tf.Tensor) -> bool:
    """Whether a gradient could come through a tensor; a variant may hold others."""
    dtype = tensor.dtype
    return not (dtype.is_integer or dtype.is_bool or dtype == tf.string)


def _replace_by_zeros(site: Placeholder) -> None:
    """Points the consumers of a placeholder at zeros."""
    with tf.control_dependencies(None), tf.device(site.call.device):
        with tf.control_dependencies(site.op.control_inputs):
            for result, like in zip(site.results, site.operands, strict=False):
                _tf.replace(result, tf.zeros_like(like))
            if site.receipt is not None:
                _tf.replace(site.receipt, tf.zeros([]))


def _close_gaps(sender: _Side, key: str) -> None:
    """Numbers the gradients that are left of one call anew, from 0 on."""
    for number, call in enumerate(sender.gradients(key)):
        for old in sorted(sender.below(call.key)):
            new = f"{key}/{number}{old.removeprefix(call.key)}"
            if new == old:
                continue
            site = sender.top.pop(old)
            placeholder.set_key(site.op, site.call, new)
            changed = placeholder.read(site.op)
            assert changed is not None
            del sender.calls[old]
            sender.calls[new] = changed
            sender.top[new] = Placeholder(site.op, changed)
