# SPDX-License-Identifier: Apache-2.0
"""Passes that lower communication, and optimizations that need it lowered."""

from __future__ import annotations

from collections.abc import Sequence

from replicator import errors
from replicator.costs import cost, hosts
from replicator.graph.ir.kinds import acting
from replicator.graph.lowering import crossing, rewrite
from replicator.graph.passes import joinable_calls, joins, kernels, owners, reads
from replicator.primitives import table
from replicator.step.draft import Draft
from replicator.variables import storage

_WRITTEN_BY_ONE_OP = "written by one op together with variables elsewhere"


def join_calls(draft: Draft) -> None:
    """Merges calls whose tensors may share messages."""
    if draft.settings.peers is None:  # else each process has to join the same ones
        draft.replicas = joinable_calls.join(
            draft.replicas, draft.scopes, draft.build.aliases.variable
        )


def lower(draft: Draft) -> None:
    """Replaces placeholders by real ops."""
    assert draft.handles is not None, "known since the checks"
    try:
        rewritten = rewrite.rewrite(
            draft.replicas,
            draft.build.world,
            table.LOWERINGS,
            draft.initializers,
            draft.settings.options.policy,
            draft.handles,
            _ways(draft),
        )
    except owners.SeveralOwners as several:
        needs = [
            storage.Need(shared.variable, _WRITTEN_BY_ONE_OP, errors.line_of(op))
            for op, written in several.found
            for shared in written
        ]
        storage.mirror(draft.build, needs)
    draft.replicas = rewritten.replicas
    draft.communications = rewritten.communications
    draft.pruned = rewritten.pruned
    draft.sharing = draft.build.aliases.resolve()


def _ways(draft: Draft) -> crossing.Ways | None:
    """Returns how to reach replicas that other processes build, if there are any."""
    peers = draft.settings.peers
    if peers is None or draft.calls_of_all is None:
        return None
    return crossing.Ways(draft.calls_of_all, peers.process, peers.order)


def read_once(draft: Draft) -> None:
    """Removes repeated reads and joins of variables; reads only rows that are used."""
    initializers = draft.initializers
    reads.join_reads(acting(draft.replicas), initializers)
    draft.replicas = reads.read_rows(draft.replicas, initializers)
    draft.active = acting(draft.replicas)
    by_all = draft.sharing - draft.build.aliases.copied
    reads.share_reads(draft.active, initializers, by_all)
    joins.share(draft.replicas, _near(draft.build.world.devices), initializers)


def _near(devices: Sequence[str]) -> list[list[int]]:
    """Returns the positions of replicas that share memory, where there are several."""
    by_host = [places for places in hosts.by_host(devices) if len(places) > 1]
    return [
        places for places in by_host if cost.share_memory([devices[n] for n in places])
    ]


def transpose_products(draft: Draft) -> None:
    """Transposes matrix products that are slow on CPUs."""
    if draft.settings.options.kernels:
        kernels.replace(draft.replicas)
