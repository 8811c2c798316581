# SPDX-License-Identifier: Apache-2.0
"""Replaces receives in backward passes by zeros where the gradient is zero.

In its backward pass, the sender of a message receives the gradient that the receiver
computes for the value. If the receiver's loss does not depend on the message, its tape
never reaches it and sends nothing back: the gradient is zero. But nothing is sent back
either if a replica should have differentiated and did not, which is an error. So zeros
are used only where the program proves them right:

- the receiver's tape watches the message, but the value is not returned and no op
  computes anything differentiable from it; or
- the receiver has differentiated through the message at another line, and also takes a
  gradient at the line in question: of a loss that does not depend on the message.

Runs once per build with sends, before anything is matched; top level only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import ops as tf_ops
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import Call, Placeholder
from replicator.graph.matching import control_flow


def answer(
    replicas: Sequence[Sequence[tf.Operation]],
    returned: Sequence[Any],
    replica_ids: Sequence[int],
) -> list[list[tf.Operation]]:
    """Removes receives from backward passes where the gradient is known to be zero.

    Args:
        replicas: `replicas[n]` are the ops of `replica_ids[n]`, in build order.
        returned: `returned[n]` is what step_fn returned for it.
        replica_ids: The replicas.

    Returns:
        The ops of each replica, less the placeholders replaced by zeros.
    """
    sides = [
        _Side(ops, r, results)
        for r, ops, results in zip(replica_ids, replicas, returned, strict=True)
    ]
    replaced: set[tf.Operation] = set()
    depth = 0
    while keys := {key for side in sides for key in side.sends(depth)}:
        for key in sorted(keys):
            replaced |= _answer_message(sides, key)
        depth += 1
    return [[op for op in ops if op not in replaced] for ops in replicas]


class _Side:
    """The calls and results of one replica."""

    def __init__(
        self, ops: Sequence[tf.Operation], replica_id: int, returned: Any
    ) -> None:
        sites = control_flow.find_sites(ops, replica_id)
        self.calls = {call.key: call for site in sites for call in site.calls}
        self.top = {s.call.key: s for s in sites if isinstance(s, Placeholder)}
        leaves = tf.nest.flatten(returned, expand_composites=True)
        self.results = {id(leaf) for leaf in leaves}

    def sends(self, depth: int) -> list[str]:
        """Returns the keys of the top-level sends at one gradient depth."""
        return [
            key
            for key, site in self.top.items()
            if site.call.facts.end == "sends" and site.call.depth == depth
        ]

    def gradients(self, key: str) -> list[Call]:
        """Returns the calls in the gradient of one call, in order."""
        gradients = [c for k, c in self.calls.items() if k.rpartition("/")[0] == key]
        return sorted(gradients, key=lambda call: int(call.key.rpartition("/")[2]))

    def below(self, key: str) -> list[str]:
        """Returns the keys of a call and of its gradients, to any order."""
        return [k for k in self.calls if k == key or k.startswith(key + "/")]


def _answer_message(sides: Sequence[_Side], key: str) -> set[tf.Operation]:
    """Answers one message's pending gradients; returns the placeholders replaced."""
    ends = [side for side in sides if key in side.calls]
    sender = next(side for side in ends if side.calls[key].facts.end == "sends")
    receivers = [s for s in ends if s.calls[key].facts.end == "receives"]
    if not receivers or key not in receivers[0].top:
        return set()
    (receiver,) = receivers
    requests, answers = sender.gradients(key), receiver.gradients(key)
    if len(requests) <= len(answers) or not sender.top.keys() >= set(sender.below(key)):
        return set()
    if answers:
        extra = _requests_elsewhere(requests, answers, receiver)
    else:
        used = _is_used(receiver.top[key], receiver.results)
        extra = [] if used else requests
    replaced = set()
    for call in extra:
        for old in sender.below(call.key):
            _replace_by_zeros(sender.top[old])
            replaced.add(sender.top[old].op)
            del sender.top[old], sender.calls[old]
    if extra:
        _close_gaps(sender, key)
    return replaced


def _requests_elsewhere(
    requests: Sequence[Call], answers: Sequence[Call], receiver: _Side
) -> list[Call]:
    """Returns the sender's gradient calls at lines where the receiver has none.

    The gradients of a message are told apart by the lines on which they are taken.
    Returns nothing if two share a line, or if the receiver takes no gradient at one of
    them.
    """
    lines = [call.line for call in requests]
    answered = [call.line for call in answers]
    differentiates = {c.line for c in receiver.calls.values() if c.backward}
    if len(set(lines)) < len(lines) or not set(lines) <= differentiates:
        return []
    if [line for line in lines if line in answered] != answered:
        return []
    return [call for call in requests if call.line not in answered]


def _is_used(received: Placeholder, results: set[int]) -> bool:
    """Whether the gradient of a received value could be nonzero.

    It could if an op computes something from the value: the result may be a loss even
    if nothing reads it. The watched value itself is no loss, or the tape would have
    reached the message.

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
_SAYS = ("Assert", "PrintV2")  # ops without results that only report a value


def _flows(tensor: tf.Tensor) -> bool:
    """Whether a gradient can flow through a tensor; a variant may hold floats."""
    dtype = tensor.dtype
    return not (dtype.is_integer or dtype.is_bool or dtype == tf.string)


def _replace_by_zeros(site: Placeholder) -> None:
    """Replaces the results of a placeholder by zeros."""
    with tf.control_dependencies(None), tf.device(site.call.device):
        with tf.control_dependencies(site.op.control_inputs):
            for result, like in zip(site.results, site.operands, strict=False):
                tf_ops.replace(result, tf.zeros_like(like))
            if site.receipt is not None:
                tf_ops.replace(site.receipt, tf.zeros([]))


def _close_gaps(sender: _Side, key: str) -> None:
    """Renumbers the remaining gradients of one call, starting from 0."""
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
