"""Replicas that choose different branches or turn counts get an error that says so.

A merged conditional takes one branch and a merged loop one number of turns. What each
replica would do by itself is compared when the step runs, wherever it is not known to
be the same: another system would hang there.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replicator.graph.equal.value_numbering import Labels
from replicator.graph.matching.control_flow import Region

_FIX = (
    "Fix: decide by a value that is the same on all replicas, for example by one that "
    "was reduced over them."
)


def agreed(
    regions: Sequence[Region],
    answers: Sequence[tf.Tensor],
    said: tuple[str, str] | None,
    labels: Labels,
) -> tf.Tensor:
    """Returns the first replica's answer, after asserting that all answer alike.

    Args:
        regions: The conditional or loop of each replica.
        answers: Which branch it would take, or whether it would make another turn.
        said: What a replica does that answers False, and True; None where the answer
            is the number of a branch.
        labels: Knows which values are the same on all replicas.
    """
    if labels.same(answers):
        return answers[0]
    # On a host, where conditionals and loops need the answer anyway.
    with tf.device(_host(regions[0].calls[0].device)):
        if said is not None:
            answers = [tf.cast(answer, tf.bool) for answer in answers]
        alike = tf.reduce_all([tf.equal(answers[0], other) for other in answers[1:]])

        def fail() -> tf.Operation:
            return tf.debugging.Assert(False, _message(regions, answers, said))

        check = tf.cond(alike, tf.no_op, fail)  # what is said costs nothing until then
        with tf.control_dependencies([check.op]):
            return tf.identity(answers[0])


def _message(
    regions: Sequence[Region],
    answers: Sequence[tf.Tensor],
    said: tuple[str, str] | None,
) -> list[tf.Tensor]:
    """Returns what an assertion prints, piece by piece."""
    construct = regions[0].construct
    pieces = [f"replicas disagree in a {construct} in which they communicate:"]
    for region, answer in zip(regions, answers, strict=True):
        does = (
            tf.strings.join(["takes branch ", tf.strings.as_string(answer)])
            if said is None
            else tf.where(answer, said[1], said[0])
        )
        pieces.append(tf.strings.join([f"replica {region.replica_id} ", does]))
    calls = regions[0].calls
    shown = "; ".join(map(str, calls[:3]))
    more = f"; ... ({len(calls)} calls)" if len(calls) > 3 else ""
    return [*pieces, f"the {construct} holds {shown}{more}", _FIX]


def _host(device: str) -> str:
    """Returns the CPU beside a device; an assertion has no kernel elsewhere."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type == "CPU":
        return device
    return spec.replace(device_type="CPU", device_index=0).to_string()
