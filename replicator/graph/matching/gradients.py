# SPDX-License-Identifier: Apache-2.0
"""Finds replicas that take the gradients of one call in different orders.

Gradients of a call are paired by their number: the n-th that one replica takes with the
n-th of the others. If two losses depend on the call and replicas differentiate them in
another order, or if one of the losses depends on it on one replica only, the gradient
of one loss would be added to that of the other. The passes, which are the calls of
tape.gradient or tf.gradients, reveal this: a gradient is out of order if it pairs with
one of another pass that its replica makes, too. A pass is identified by its line and,
for collectives, by its number among those of the line. The two ends of a message often
differentiate in another order, as the stages of a pipeline do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from replicator import errors
from replicator._tf import functions, tapes
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import Call


@dataclasses.dataclass
class Passes:
    """The passes in which a replica takes gradients, whether or not they reach a call.

    Those of given gradients (output_gradients, grad_ys) are not found.

    Attributes:
        counts: The number of passes at each line.
        numbers: The number, from 1 on, of the pass that each call in a gradient belongs
            to, by its key.
    """

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)


def passes(ops: Iterable[tf.Operation]) -> Passes:
    """Returns the passes among a replica's ops, which are in build order."""
    result = Passes()
    _count(ops, "", result)
    return result


def _count(ops: Iterable[tf.Operation], line: str, result: Passes) -> None:
    """Adds the passes of one graph, built in a pass at `line` or in none."""
    before = False
    for op in ops:
        begins = tapes.begins_pass(op)
        if begins and not before:
            line = errors.line_of(op)
            result.counts[line] = result.counts.get(line, 0) + 1
        before = begins
        call = placeholder.read(op)
        if call is not None and call.backward and call.line == line:
            result.numbers[call.key] = result.counts[line]
        elif kind_of(op).calls:
            for _, body in functions.called_graphs(op):
                _count(body.get_operations(), line, result)


def out_of_order(
    calls: Sequence[Sequence[Call]],
    partners: Iterable[Mapping[int, Call]],
    passes: Sequence[Passes] = (),
) -> tuple[Call, Call] | None:
    """Returns two calls in gradients that pair, but belong to different losses, if any.

    Args:
        calls: All calls of all replicas.
        partners: The calls that pair, by replica.
        passes: The passes of each replica, if they are known.
    """
    lines: dict[tuple[int, str], set[str]] = {}
    for replica_calls in calls:
        for call in replica_calls:
            if call.backward:
                call_lines = lines.setdefault((call.replica_id, _forward(call)), set())
                call_lines.add(call.line)

    def passed(by: Call, at: Call) -> bool:
        """Whether the replica of one call takes gradients at the line of another."""
        if at.line in lines[by.replica_id, _forward(by)]:
            return True
        return bool(passes) and at.line in passes[by.replica_id].counts

    for members in partners:
        first, *others = members.values()
        for other in others if first.backward else ():
            if first.line == other.line:
                if passes and _numbered_otherwise(first, other, passes):
                    return first, other
            elif passed(first, other) or passed(other, first):
                return first, other
    return None


def _numbered_otherwise(first: Call, other: Call, passes: Sequence[Passes]) -> bool:
    """Whether calls are of different passes at a line where both replicas have both."""
    if first.pairs_as == "message":
        return False
    first_passes, other_passes = (passes[call.replica_id] for call in (first, other))
    numbers = (
        first_passes.numbers.get(first.key, 0),
        other_passes.numbers.get(other.key, 0),
    )
    if numbers[0] == numbers[1] or not all(numbers):
        return False
    return max(numbers) <= min(
        first_passes.counts[first.line], other_passes.counts[first.line]
    )


def _forward(call: Call) -> str:
    """Returns the key of the call that one in a gradient differentiates."""
    return call.key.rpartition("/")[0]
