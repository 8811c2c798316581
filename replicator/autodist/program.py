# SPDX-License-Identifier: Apache-2.0
"""What a session of a graph for one device runs: the ops that its fetches need.

Reads the user's graph and changes nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence

import tensorflow as tf

from replicator import errors
from replicator.autodist import slots
from replicator.graph.ir import functional, walk
from replicator.graph.ir.kinds import resource_inputs

READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_UPDATES = re.compile(
    rf"Assign(Add|Sub)VariableOp|{slots.UPDATES.pattern}|ResourceScatter\w+"
)
_REFUSED = re.compile(
    r"Variable(V2)?|TemporaryVariable|Collective\w+|Nccl\w+|_?Send|_?Recv|_?HostSend"
    r"|_?HostRecv"
)


@dataclasses.dataclass(frozen=True)
class Needed:
    """What a run of some fetches needs.

    Attributes:
        ops: The ops, but for those that are fed.
        handles: The handles of variables among their inputs.
        resources: The ops that create iterators, tables and queues.
    """

    ops: Collection[tf.Operation]
    handles: Sequence[tf.Tensor]
    resources: Sequence[tf.Operation]


def needed(targets: Iterable[tf.Operation], fed: Sequence[tf.Tensor]) -> Needed:
    """Returns what a run needs.

    Args:
        targets: The ops that are fetched, or whose results are.
        fed: What is fed.

    Raises:
        UnsupportedError: An op cannot run on replicas.
        ArgumentError: Only one of the results of an op is fed.
    """
    given = {t.ref() for t in fed}
    fed_ops = {t.op for t in fed}

    def sources(op: tf.Operation) -> list[tf.Operation]:
        _refuse(op)
        for tensor in op.inputs:
            if tensor.op in fed_ops and tensor.ref() not in given:
                raise _fed_in_part(tensor)
        return [one for one in walk.waits_for(op) if one not in fed_ops]

    targets = [op for op in targets if op not in fed_ops]
    found = dict.fromkeys(walk.in_order(targets, sources))
    handles = [op.outputs[0] for op in found if op.type == "VarHandleOp"]
    resources = [op for op in found if _creates(op)]
    by_name = lambda one: one.name  # noqa: E731  # the same order in all processes
    return Needed(found, sorted(handles, key=by_name), sorted(resources, key=by_name))


def check_fed(ops: Iterable[tf.Operation]) -> None:
    """Raises if a placeholder is among what runs.

    Raises:
        ArgumentError: It is.
    """
    for op in ops:
        if op.type in ("Placeholder", "PlaceholderV2"):
            raise errors.ArgumentError(
                f"{op.name} is needed for what is fetched, and is not fed.",
                [
                    f"created at {errors.line_of(op)}",
                    f"fetched at {errors.user_line()}",
                ],
                f'feed it: session.run(fetches, {{"{op.name}:0": value}}).',
            )


def _creates(op: tf.Operation) -> bool:
    """Whether an op creates a resource that lasts: an iterator, a table, a queue."""
    is_resource = any(t.dtype == tf.resource for t in op.outputs)
    return is_resource and not op.inputs and op.type != "VarHandleOp"


def reads_first(
    ops: Collection[tf.Operation],
) -> dict[tf.Operation, list[tf.Operation]]:
    """Returns reads that come before updates, though nothing in the graph says so.

    The runtime decides on the order of a read and an update that do not depend on each
    other. On one device the read nearly always comes first, having nothing to wait for.
    That must hold for replicas, too, where one's update may be another's as well.

    Args:
        ops: What runs.

    Returns:
        The reads, by the updates.
    """
    reads: dict[tf.Operation, list[tf.Operation]] = {}
    for op in ops:
        if op.type in READS and not op.control_inputs:
            value = (t.op for t in op.inputs[1:])
            sources = walk.upstream(value, walk.computed_from, ops)
            if not any(
                one.control_inputs or _UPDATES.fullmatch(one.type) for one in sources
            ):
                reads.setdefault(op.inputs[0].op, []).append(op)
    found: dict[tf.Operation, list[tf.Operation]] = {}
    for op in ops:
        if is_update(op, ops):
            handles = [t.op for _, t in resource_inputs(op)]
            before = [read for handle in handles for read in reads.get(handle, ())]
            if before:
                found[op] = sorted(before, key=lambda one: one.name)
    return found


def is_update(op: tf.Operation, ops: Collection[tf.Operation]) -> bool:
    """Whether an op writes a value that depends on the variable's previous one."""
    if _UPDATES.fullmatch(op.type):
        return True
    if op.type != "AssignVariableOp":
        return False
    handle = op.inputs[0]
    return any(
        one.type == "ReadVariableOp" and one.inputs[0] is handle
        for one in walk.upstream([op.inputs[1].op], walk.computed_from, ops)
    )


def _refuse(op: tf.Operation) -> None:
    functional.refuse_raw(
        [op],
        "build it in autodist.scope(), which has those of TensorFlow 2; build an "
        "imported graph by its program.",
    )
    if _REFUSED.fullmatch(op.type):
        raise errors.UnsupportedError(
            f"{op.type} {op.name} cannot run on replicas: it holds state without a "
            "handle, or communicates by itself.",
            [f"at {errors.line_of(op)}"],
            "use variables created in the scope, datasets and tables.",
        )


def _fed_in_part(tensor: tf.Tensor) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"some results of {tensor.op.name} are fed, but {tensor.name} is not, and is "
        "needed.",
        [f"created at {errors.line_of(tensor.op)}", f"fed at {errors.user_line()}"],
        "feed all results of the op, or tf.identity of those that are fed.",
    )
