# SPDX-License-Identifier: Apache-2.0
"""Joins consecutive independent calls that ask for it into one communication.

A single-device program computes its gradients one variable at a time, and each is
reduced by its own call. Consecutive calls are lowered as one call with all their
tensors, so that small tensors travel together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir.placeholder import TOGETHER, Placeholder
from replicator.graph.matching.control_flow import Region

Site = Placeholder | Region
Node = tuple[Site, ...]  # ops that are merged into one


@dataclasses.dataclass(frozen=True)
class Joined(Placeholder):
    """Several placeholders of a replica, treated as one.

    Attributes:
        parts: The placeholders, in order; `op` is the first one's, and `call` covers
            all.
    """

    parts: tuple[Placeholder, ...]

    @property
    def operands(self) -> tuple[tf.Tensor, ...]:
        """The operands of all parts."""
        return tuple(tensor for part in self.parts for tensor in part.operands)

    @property
    def results(self) -> tuple[tf.Tensor, ...]:
        """The results of all parts, until they are rewired."""
        return tuple(tensor for part in self.parts for tensor in part.results)


def join(nodes: Sequence[Node]) -> list[Node]:
    """Joins the groups of ops that can be lowered as one call.

    Args:
        nodes: The groups of ops that are merged into one, in order.

    Returns:
        The groups, with each run of joinable ones joined.
    """
    communicating = {site.op for node in nodes for site in node}
    joined: list[Node] = []
    waiting: list[Node] = []
    dependents: set[tf.Operation] = set()  # of the waiting nodes
    for node in nodes:
        joinable = _may_be_joined(node)
        if waiting and not (joinable and _goes_with(node, waiting, dependents)):
            joined.append(_joined(waiting))
            waiting, dependents = [], set()
        if not joinable:
            joined.append(node)
            continue
        waiting.append(node)
        if _reach([site.op for site in node], dependents) & communicating:
            joined.append(_joined(waiting))
            waiting, dependents = [], set()
    return [*joined, _joined(waiting)] if waiting else joined


def _may_be_joined(node: Node) -> bool:
    return all(
        isinstance(site, Placeholder)
        and site.call.options.get(TOGETHER)
        and not site.op.control_inputs
        for site in node
    )


def _goes_with(node: Node, others: Sequence[Node], needing: set[tf.Operation]) -> bool:
    """Whether a call has the options of the others and depends on none of them."""
    if any(site.op in needing for site in node):
        return False
    (call, other) = (calls[0].calls[0] for calls in (node, others[0]))
    return (call.options, call.group) == (other.options, other.group)


def _reach(ops: Sequence[tf.Operation], known: set[tf.Operation]) -> set[tf.Operation]:
    """Returns the transitive consumers that are not yet in `known`, and adds them."""
    new: set[tf.Operation] = set()
    stack = list(ops)
    while stack:
        op = stack.pop()
        after = [consumer for tensor in op.outputs for consumer in tensor.consumers()]
        for consumer in (*after, *_tf.control_outputs(op)):
            if consumer not in known:
                known.add(consumer)
                new.add(consumer)
                stack.append(consumer)
    return new


def _joined(nodes: Sequence[Node]) -> Node:
    """Joins several groups of placeholders into one."""
    if len(nodes) == 1:
        return nodes[0]
    return tuple(_one(parts) for parts in zip(*nodes, strict=True))


def _one(parts: Sequence[Site]) -> Joined:
    """Joins several placeholders of one replica into one."""
    placeholders = [part for part in parts if isinstance(part, Placeholder)]
    call = dataclasses.replace(
        placeholders[0].call,
        operands=tuple(value for part in placeholders for value in part.call.operands),
        agreed=tuple(value for part in placeholders for value in part.call.agreed),
        policies=tuple(
            part.call.policy(k)
            for part in placeholders
            for k in range(len(part.operands))
        ),
    )
    return Joined(placeholders[0].op, call, tuple(placeholders))
