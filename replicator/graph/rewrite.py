"""Replaces matched placeholders by real cross-device ops.

Runs once per build, after all replicas are built. `lower_and_rewire` is the only place
where a graph is changed: every decision was taken before, on facts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from replicator import _tf
from replicator.graph import cost, match
from replicator.graph.placeholder import Call, Placeholder, find


@dataclasses.dataclass(frozen=True)
class Matched:
    """One communication, with all of its participants, ready to be lowered.

    Attributes:
        calls: `calls[r]` is replica r's call.
        operands: `operands[r][k]` is the k-th tensor that replica r hands in.
        devices: `devices[r]` is where replica r runs.
        hubs: Deals out the devices on which shared work is done.
    """

    calls: tuple[Call, ...]
    operands: tuple[tuple[tf.Tensor, ...], ...]
    devices: tuple[str, ...]
    hubs: cost.Hubs

    @property
    def options(self) -> dict:
        """What the replicas agreed on."""
        return self.calls[0].options

    def column(self, k: int) -> list[tf.Tensor]:
        """Returns the k-th operand of every replica, in replica order."""
        return [own[k] for own in self.operands]


# A lowering returns `results[r][k]`, what replica r receives as its k-th result.
Lowering = Callable[[Matched], Sequence[Sequence[tf.Tensor]]]


def lower_and_rewire(
    replicas: Sequence[Sequence[tf.Operation]],
    devices: Sequence[str],
    lowerings: Mapping[str, Lowering],
) -> int:
    """Matches, lowers and rewires all communication of one build.

    Args:
        replicas: `replicas[r]` are the ops of replica r's sub-graph, in build order.
        devices: `devices[r]` is where replica r runs.
        lowerings: For each primitive, how it becomes real ops.

    Returns:
        The number of communications.

    Raises:
        MismatchError: The replicas do not communicate alike.
    """
    found = [find(ops) for ops in replicas]
    plan = match.match([[p.call for p in own] for own in found])
    hubs = cost.Hubs(devices)
    for indices in plan:
        matched = [own[n] for own, n in zip(found, indices, strict=True)]
        _rewire(matched, _lower(matched, tuple(devices), hubs, lowerings))
    return len(plan)


def _lower(
    matched: Sequence[Placeholder],
    devices: tuple[str, ...],
    hubs: cost.Hubs,
    lowerings: Mapping[str, Lowering],
) -> Sequence[Sequence[tf.Tensor]]:
    """Adds the real ops for one communication; returns results by replica."""
    communication = Matched(
        calls=tuple(p.call for p in matched),
        operands=tuple(p.operands for p in matched),
        devices=devices,
        hubs=hubs,
    )
    primitive = matched[0].call.primitive
    # What the user made a call wait for, every participant's result waits for.
    before = [op for p in matched for op in p.op.control_inputs]
    with tf.control_dependencies(None), tf.control_dependencies(before):
        with tf.name_scope(f"communicate/{primitive}"):
            return lowerings[primitive](communication)


def _rewire(
    matched: Sequence[Placeholder], results: Sequence[Sequence[tf.Tensor]]
) -> None:
    """Points all consumers of the placeholders at the real results."""
    for placeholder, own in zip(matched, results, strict=True):
        for old, new in zip(placeholder.results, own, strict=True):
            _tf.replace(old, new)
