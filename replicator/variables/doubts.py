# SPDX-License-Identifier: Apache-2.0
"""Warns of what a step writes that is right only if it is equal on all replicas.

Whoever writes a value notes it while a replica is built. Once the calls of all replicas
are known to pair, what was noted is compared, also inside control flow and functions;
a value that is equal by construction is as right as on one device.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import context
from replicator._tf import frames
from replicator.graph.ir.kinds import kind_of
from replicator.graph.same.levels import Level, Ops

_told: weakref.WeakSet[Any] = weakref.WeakSet()  # that of which it was said


@dataclasses.dataclass(frozen=True)
class Doubt:
    """A value that should be equal on all replicas.

    Attributes:
        written: What is written instead; it is also kept alive by this.
        own: The replica's own value.
        about: What the warning is about; there is one for each.
        warning: The text.
    """

    written: tf.Tensor
    own: tf.Tensor
    about: Any
    warning: str


class _Noted(dict[int, Doubt]):
    """The doubts of a build, by the id of what is written."""


def note(replica: context.ReplicaContext, doubt: Doubt) -> None:
    """Notes that a replica is about to write a value.

    Args:
        replica: The replica being built.
        doubt: The value, and the warning that is due if it is not equal on all.
    """
    replica.build.states.of(_Noted)[id(doubt.written)] = doubt


def tell(build: context.Build, level: Level) -> None:
    """Warns of noted values that are not equal on all replicas by construction.

    Args:
        build: The build.
        level: The ops of all replicas.
    """
    noted = build.states.of(_Noted)
    if noted:
        _tell(noted, level, set())


def _tell(noted: dict[int, Doubt], level: Level, seen: set[Ops]) -> None:
    for key in level.resources:
        columns = [writes.get(key, []) for writes in level.writes]
        for ops in zip(*columns, strict=False):
            if ops in seen:
                continue
            seen.add(ops)
            if kind_of(ops[0]).calls:
                for body in level.bodies(ops):
                    _tell(noted, body, seen)
                continue
            (first,) = [noted.get(id(x)) for x in ops[0].inputs[1:2]] or [None]
            if first is None or first.about in _told:
                continue
            own = [_own(noted, first, op) for op in ops]
            found = tuple(value for value in own if value is not None)
            if len(found) == len(ops) and level.difference(found) is not None:
                warn(first.about, first.warning)


def _own(noted: dict[int, Doubt], first: Doubt, op: tf.Operation) -> tf.Tensor | None:
    """Returns a replica's own value, which a copy computes as the first replica does.

    Args:
        noted: The doubts.
        first: That of the first replica.
        op: The replica's write.
    """
    doubt = noted.get(id(op.inputs[1]))
    if doubt is not None:
        return doubt.own
    stack, seen = [op.inputs[1].op], {op.inputs[1].op}
    while stack:
        source = stack.pop()
        if frames.copied_from(source) is first.own.op:
            return source.outputs[first.own.value_index]
        new = {tensor.op for tensor in source.inputs} - seen
        seen |= new
        stack += new
    return None


def warn(about: Any, warning: str) -> None:
    """Logs a warning, unless there has been one about the same."""
    if about not in _told:
        _told.add(about)
        logging.warning("%s", warning)
