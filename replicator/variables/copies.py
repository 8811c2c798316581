# SPDX-License-Identifier: Apache-2.0
"""Copies that replicas have of a variable which one of them owns for all.

A step reads the copies: each replica its own, without a transfer. What a wrapped
optimizer reads and writes is the owner's, as if there were no copies; when it is done,
its new value is handed to all copies. So between updates, and outside of steps, all are
equal, and read and written as those of a mirrored variable are.

Source: AutoDist's local_proxy_variable; Zhang et al. 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context
from replicator.graph.ir.captures import Captures
from replicator.graph.ir.kinds import resource_inputs
from replicator.primitives import broadcast
from replicator.variables import storage

_WRITTEN = "copies written"  # a finding of builds
_BY_OP = "written by an op, past its methods, while replicas have copies of it"


def refresh(variables: Iterable[Any], replica: context.ReplicaContext) -> list[Any]:
    """Gives the copies of variables the value that an optimizer has just written.

    Args:
        variables: ReplicatedVariables, of which some may have copies.
        replica: The replica being built.

    Returns:
        The ops that write this replica's.
    """
    by_owner: dict[int, list[Any]] = {}
    for variable in variables:
        if variable.placement.has_copies:
            by_owner.setdefault(variable.owner, []).append(variable)
    done = []
    for owner, own in by_owner.items():
        with _tf.stop_recording():
            with replica.equal_updates():
                values = [variable.read_value() for variable in own]
            values = broadcast.broadcast(values, root=owner)
            with replica.build.ledger.agreed():
                done += [
                    variable.refresh_copy(value, replica)
                    for variable, value in zip(own, values, strict=True)
                ]
    return done


class CopyWriter(_tf.HandleVariable):
    """What ReplicatedVariable adds to writes while there are copies."""

    def refresh_copy(self, value: tf.Tensor, replica: context.ReplicaContext) -> Any:
        """Writes the replica's copy; returns the op that does."""
        op = self._write_own("assign", value, None, read_value=False)
        _note(replica.build, op)
        replica.reads.enter(self.handle, op, self.shape)
        return op

    def _write_copied(
        self, method: str, value: Any, op: Any, replica: context.ReplicaContext
    ) -> None:
        """Writes what there are copies of, after an op has written the replica's."""
        if not self.placement.has_copies or replica.updating:
            return
        _note(replica.build, op)
        if _is_apart(self):
            with replica.equal_updates():
                self._write_own(method, value, None, read_value=False)


def _note(build: context.Build, op: Any) -> None:
    """Notes an op that writes a copy, as what is copied is written, too."""
    build.findings.setdefault(_WRITTEN, set()).add(op)


def _is_apart(variable: Any) -> bool:
    """Whether what there are copies of is on no replica's device."""
    own = variable.components[: variable.world.num_local]
    return all(component is not variable.storage.first for component in own)


def check(build: context.Build, variable: Any, ops: Sequence[tf.Operation]) -> None:
    """Sees to it that nothing writes copies alone, while what is copied is elsewhere.

    Args:
        build: The build.
        variable: A ReplicatedVariable.
        ops: Those by which the replicas write it.

    Raises:
        BuildAgain: An op does; now the variable is mirrored.
    """
    if not variable.placement.has_copies or not _is_apart(variable):
        return
    known = build.findings.get(_WRITTEN, set())
    first = {id(variable.storage.first.handle)}
    aliases = build.aliases.variables()
    outermost = Captures().outermost
    for op in ops:
        if op in known:
            continue
        handles = {id(outermost(tensor)) for _, tensor in resource_inputs(op)}
        if not any(key in aliases or key in first for key in handles):
            storage.mirror(build, [storage.need_of(variable, _BY_OP, op)])
