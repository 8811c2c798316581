# SPDX-License-Identifier: Apache-2.0
"""Reports replicas that choose different branches or numbers of loop iterations.

A merged conditional takes one branch, and a merged loop makes one number of iterations.
Unless the replicas' choices are known to agree, they are compared at run time and a
difference is an error, where another system would hang.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replicator.costs import hosts
from replicator.graph.ir.placeholder import Value
from replicator.graph.lowering.crossing import Ways, exchanged
from replicator.graph.matching.control_flow import Region
from replicator.graph.same.keys import Keys

_FIX = (
    "Fix: base the decision on a value that is the same on all replicas, for example "
    "one that was reduced over them."
)


def agreed(
    regions: Sequence[Region],
    answers: Sequence[tf.Tensor],
    outcomes: tuple[str, str] | None,
    labels: Keys,
    ways: Ways | None = None,
    depth: int = 0,
) -> tf.Tensor:
    """Returns the first replica's answer, after asserting that all answers agree.

    Args:
        regions: The conditional or loop of each replica.
        answers: Which branch each would take, or whether it would iterate again.
        outcomes: What a replica does that answers False, and True, for messages; None
            if the answer is the number of a branch.
        labels: Identifies values that are the same on all replicas.
        ways: The channels to replicas built by other processes, if any.
        depth: How many control flow ops enclose this one.
    """
    ids = [region.replica_id for region in regions]
    crossed = None if ways is None else _crossed(ways, regions, answers, depth)
    if crossed is not None:
        ids, answers = crossed
    elif labels.same(answers):
        return answers[0]
    # On a host CPU, where conditionals and loops need the answer anyway.
    with tf.device(hosts.cpu_of(regions[0].calls[0].device)):
        if outcomes is not None:
            answers = [tf.cast(answer, tf.bool) for answer in answers]
        else:
            count = len(regions[0].op.get_attr("branches"))
            answers = [_branch(answer, count) for answer in answers]
        alike = tf.reduce_all([tf.equal(answers[0], other) for other in answers[1:]])

        def fail() -> tf.Operation:
            return tf.debugging.Assert(False, _message(regions, ids, answers, outcomes))

        check = tf.cond(alike, tf.no_op, fail)  # builds the message only on failure
        with tf.control_dependencies([check.op]):
            return tf.identity(answers[0])


def _branch(index: tf.Tensor, count: int) -> tf.Tensor:
    """Returns the branch that is taken: the last one if there is none of this index."""
    return tf.where((index >= 0) & (index < count), index, count - 1)


def _crossed(
    ways: Ways, regions: Sequence[Region], answers: Sequence[tf.Tensor], depth: int
) -> tuple[list[int], Sequence[tf.Tensor]] | None:
    """Returns the ids and the answers of all participants, local or not.

    None if all of them are local.
    """
    calls = {call.key: call for region in regions for call in region.calls}
    ids = sorted({r for call in calls.values() for r in call.group})
    way = ways.of_region(calls[min(calls)], ids, depth)
    if way is None:
        return None
    dtype = answers[0].dtype if answers[0].dtype in (tf.bool, tf.int32) else tf.bool
    local_answers = {
        region.replica_id: (tf.cast(answer, dtype),)
        for region, answer in zip(regions, answers, strict=True)
    }
    value = Value(dtype.name, ())
    passed = exchanged(
        way,
        [ways.elsewhere.world.processes[r] for r in ids],
        [[value]] * len(ids),
        [local_answers.get(r) for r in ids],
    )
    return ids, [answer for (answer,) in passed]


def _message(
    regions: Sequence[Region],
    ids: Sequence[int],
    answers: Sequence[tf.Tensor],
    outcomes: tuple[str, str] | None,
) -> list[tf.Tensor]:
    """Returns the message of the assertion, in pieces."""
    construct = regions[0].construct
    pieces = [f"replicas disagree in a {construct} in which they communicate:"]
    for replica_id, answer in zip(ids, answers, strict=True):
        does = (
            tf.strings.join(["takes branch ", tf.strings.as_string(answer)])
            if outcomes is None
            else tf.where(answer, outcomes[1], outcomes[0])
        )
        pieces.append(tf.strings.join([f"replica {replica_id} ", does]))
    calls = regions[0].calls
    text = "; ".join(map(str, calls[:3]))
    more = f"; ... ({len(calls)} calls)" if len(calls) > 3 else ""
    return [*pieces, f"the {construct} holds {text}{more}", _FIX]
