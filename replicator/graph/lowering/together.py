# SPDX-License-Identifier: Apache-2.0
"""Makes one communication of calls that say so, and of which none needs another.

A program of one device takes the gradient of one variable after the other; each is made
one by a call of its own. Where such calls follow one another, they are lowered as if
there had been one call of all their tensors, so that small ones travel together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir.placeholder import TOGETHER, Placeholder
from replicator.graph.matching.control_flow import Region

Site = Placeholder | Region
Node = tuple[Site, ...]  # the ops that become one


@dataclasses.dataclass(frozen=True)
class Joined(Placeholder):
    """Several placeholders of a replica, as one.

    Attributes:
        parts: These, in order; `op` is that of the first, and `call` of all of them.
    """

    parts: tuple[Placeholder, ...]

    @property
    def operands(self) -> tuple[tf.Tensor, ...]:
        """What the replica passes by all of them."""
        return tuple(tensor for part in self.parts for tensor in part.operands)

    @property
    def results(self) -> tuple[tf.Tensor, ...]:
        """What stands for the results of all of them."""
        return tuple(tensor for part in self.parts for tensor in part.results)


def join(nodes: Sequence[Node]) -> list[Node]:
    """Returns the sets of ops that become one, with one set for those that go together.

    Args:
        nodes: The sets of ops that become one, in order.
    """
    communicating = {site.op for node in nodes for site in node}
    made: list[Node] = []
    waiting: list[Node] = []
    needing: set[tf.Operation] = set()  # what depends on those
    for node in nodes:
        ready = _may_be_joined(node)
        if waiting and not (ready and _goes_with(node, waiting, needing)):
            made.append(_joined(waiting))
            waiting, needing = [], set()
        if not ready:
            made.append(node)
            continue
        waiting.append(node)
        if _reach([site.op for site in node], needing) & communicating:
            made.append(_joined(waiting))
            waiting, needing = [], set()
    return [*made, _joined(waiting)] if waiting else made


def _may_be_joined(node: Node) -> bool:
    return all(
        isinstance(site, Placeholder)
        and site.call.options.get(TOGETHER)
        and not site.op.control_inputs
        for site in node
    )


def _goes_with(node: Node, others: Sequence[Node], needing: set[tf.Operation]) -> bool:
    """Whether a call is as others are, and needs none of them."""
    if any(site.op in needing for site in node):
        return False
    (one, two) = (calls[0].calls[0] for calls in (node, others[0]))
    return (one.options, one.group) == (two.options, two.group)


def _reach(ops: Sequence[tf.Operation], known: set[tf.Operation]) -> set[tf.Operation]:
    """Returns what depends on ops and was not known to; notes that it is known."""
    new: set[tf.Operation] = set()
    stack = list(ops)
    while stack:
        op = stack.pop()
        after = [one for tensor in op.outputs for one in tensor.consumers()]
        for one in (*after, *_tf.control_outputs(op)):
            if one not in known:
                known.add(one)
                new.add(one)
                stack.append(one)
    return new


def _joined(nodes: Sequence[Node]) -> Node:
    """Returns one set of placeholders in the place of several."""
    if len(nodes) == 1:
        return nodes[0]
    return tuple(_one(parts) for parts in zip(*nodes, strict=True))


def _one(parts: Sequence[Site]) -> Joined:
    """Returns several placeholders of one replica as one."""
    own = [part for part in parts if isinstance(part, Placeholder)]
    call = dataclasses.replace(
        own[0].call,
        operands=tuple(one for part in own for one in part.call.operands),
        agreed=tuple(one for part in own for one in part.call.agreed),
        policies=tuple(
            part.call.policy(k) for part in own for k in range(len(part.operands))
        ),
    )
    return Joined(own[0].op, call, tuple(own))
