# SPDX-License-Identifier: Apache-2.0
"""Copies that replicas hold of a variable that one of them owns.

In a step each replica reads its own copy, without a transfer. A wrapped optimizer reads
and writes the owner's component as if there were no copies; when it is done, the new
value is broadcast to all copies. So between updates and outside steps all of them are
equal, and are read and written like a mirrored variable's components.

Source: AutoDist's local_proxy_variable; Zhang et al. 2020.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator._tf import frames, tapes
from replicator._tf import variables as tf_variables
from replicator.graph.ir.captures import Captures
from replicator.graph.ir.kinds import resource_inputs
from replicator.graph.passes.reads import Recent
from replicator.primitives import broadcast
from replicator.variables import storage


class _Written(set[Any]):
    """The ops that write a copy and whose value the source also gets."""


_BY_OP = "written by an op, not by its methods, while replicas have copies of it"


def refresh(variables: Iterable[Any], replica: context.ReplicaContext) -> list[Any]:
    """Updates the copies of variables that an optimizer has just written.

    Args:
        variables: ReplicatedVariables, some of which may have copies.
        replica: The replica being built.

    Returns:
        The ops that write this replica's copies.
    """
    by_owner: dict[int, list[Any]] = {}
    for variable in variables:
        if variable.placement.has_copies:
            by_owner.setdefault(variable.owner, []).append(variable)
    writes = []
    for owner, owned in by_owner.items():
        with tapes.stop_recording():
            with replica.equal_updates():
                values = [variable.read_value() for variable in owned]
            values = broadcast.broadcast(values, root=owner)
            with replica.build.ledger.agreed():
                writes += [
                    variable.refresh_copy(value, replica)
                    for variable, value in zip(owned, values, strict=True)
                ]
    return writes


class CopyWriter(tf_variables.HandleVariable):
    """Makes ReplicatedVariable's writes keep copies and their source equal."""

    def refresh_copy(self, value: tf.Tensor, replica: context.ReplicaContext) -> Any:
        """Writes the replica's copy and returns the op that does."""
        op = self._write_own("assign", value, None, read_value=False)
        _note(replica.build, op)
        replica.states.of(Recent).enter(self.handle, op, self.shape)
        return op

    def _write_copied(
        self, method: str, value: Any, op: Any, replica: context.ReplicaContext
    ) -> None:
        """Also writes the source of the copies, after `op` wrote the replica's copy."""
        if not self.placement.has_copies or replica.mode.updating:
            return
        _note(replica.build, op)
        if _is_apart(self):
            with replica.equal_updates():
                self._write_own(method, value, None, read_value=False)


def _note(build: context.Build, op: Any) -> None:
    """Notes an op that writes a copy and whose value the source also gets."""
    build.states.of(_Written).add(op)


def _is_apart(variable: Any) -> bool:
    """Whether the source of the copies is on no replica's device."""
    copies = variable.components[: variable.world.num_local]
    return all(component is not variable.storage.first for component in copies)


def check(build: context.Build, variable: Any, ops: Sequence[tf.Operation]) -> None:
    """Checks that nothing writes the copies without their source, if that is apart.

    Args:
        build: The build.
        variable: A ReplicatedVariable.
        ops: The ops by which the replicas write it.

    Raises:
        BuildAgain: An op does, so the variable is mirrored from now on.
    """
    if not variable.placement.has_copies or not _is_apart(variable):
        return
    paired_writes = build.states.of(_Written)
    source_ids = {id(variable.storage.first.handle)}
    aliases = build.aliases.variables()
    outermost = Captures().outermost
    for op in ops:
        if frames.copied_from(op) in paired_writes:
            continue
        handles = {id(outermost(tensor)) for _, tensor in resource_inputs(op)}
        if not any(key in aliases or key in source_ids for key in handles):
            storage.mirror(build, [storage.need_of(variable, _BY_OP, op)])
