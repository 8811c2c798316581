# SPDX-License-Identifier: Apache-2.0
"""Creates a feed from a Dataset, an input_fn, or values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.cluster.peers import Peers
from replicator.costs import rehearsal
from replicator.inputs import (
    agreed_ends,
    checks,
    ends,
    iterators,
    moving,
    places,
    shards,
    shared_pipelines,
)
from replicator.inputs.feeds import DatasetFeed, Feed, PartFeed, ShardsFeed, ValuesFeed
from replicator.inputs.input_context import InputContext
from replicator.world import World

# Parameters of these names receive the context even if they have a default.
_CONTEXT_NAMES = ("ctx", "context", "input_context")


@dataclasses.dataclass(frozen=True)
class AsynchronousProgram:
    """One of the programs that train the same variables asynchronously.

    Attributes:
        number: Its index.
        count: The number of programs.
    """

    number: int = 0
    count: int = 1


_ONLY_PROGRAM = AsynchronousProgram()


def make_feed(
    inputs: Any,
    world: World,
    input_mode: str,
    remainder: str = "drop",
    peers: Peers | None = None,
    program: AsynchronousProgram = _ONLY_PROGRAM,
) -> Feed:
    """Creates the feed for a Dataset, or for an input_fn's result.

    Args:
        inputs: A Dataset; or an input_fn, which takes an InputContext, or nothing, and
            returns a Dataset, a function that returns an element, or an element (a nest
            of tensors).
        world: All replicas, and the local ones, which are fed.
        input_mode: "per_replica": input_fn is called once per replica; a Dataset
            created without an InputContext is dealt, element by element, since every
            replica would see all of it. "per_worker": input_fn is called once, and its
            Dataset dealt. "global_batch": input_fn is called once, and each element is
            split.
        remainder: What happens to a last round that lacks elements for some replicas,
            "drop" or "pad".
        peers: The processes that build the other replicas, if any.
        program: The asynchronous program that is fed.

    Raises:
        InputError: The inputs cannot feed a step.
    """
    shared = True
    if isinstance(inputs, checks.DATASETS):
        checks.check_here(inputs)
        # A copy: an entry cached under a dataset must not hold that dataset, or neither
        # would ever be freed.
        sources: list[Any] = [copy.copy(inputs)]
    else:
        sources, shared = _sources(inputs, world, input_mode, program)
    if not isinstance(sources[0], checks.DATASETS):
        return values_feed(sources, world, input_mode)
    checks.check_equal_specs([source.element_spec for source in sources])
    if program.count > 1 and shared and isinstance(sources[0], tf.data.Dataset):
        sources = [source.shard(program.count, program.number) for source in sources]
    if peers is None:
        return _datasets_feed(inputs, sources, world.devices, input_mode, remainder)
    compared = None
    if shared:
        compared = shared_pipelines.check(inputs, sources[0], peers)
        devices = shared_pipelines.devices(world)
        whole = _datasets_feed(inputs, sources, devices, input_mode, remainder)
        feed: Feed = PartFeed(whole, world.local)
    else:
        if remainder == "pad":
            agreed_ends.refuse_padding()
        feed = _datasets_feed(inputs, sources, world.devices, input_mode, remainder)
    feed.agree(peers, compared)
    return feed


def values_feed(sources: Sequence[Any], world: World, input_mode: str) -> Feed:
    """Creates the feed for functions or tensors; see `make_feed`.

    Args:
        sources: One per local replica; or one that is split.
        world: All replicas, and the local ones, which are fed.
        input_mode: As in `make_feed`.
    """
    if input_mode != "global_batch":
        return ValuesFeed(sources, world.devices, world.local)
    host = places.middle(world.devices)
    feed = ShardsFeed(
        ValuesFeed(sources[:1], [host], [0]),
        lambda whole: _split(whole[0], world.num_replicas),
        host,
    )
    return PartFeed(feed, world.local) if world.processes else feed


def _split(batch: Any, num_replicas: int) -> list[shards.Shard]:
    """Splits a global batch; in a rehearsal, replicas keep the size of their shards."""
    parts = shards.split(batch, rehearsal.shares(num_replicas))
    return [parts[r % len(parts)] for r in range(num_replicas)]


def _host_id(hosts: Sequence[int], world: World, replica_id: int | None) -> int:
    """Returns the host of a replica, or of the only pipeline."""
    if world.processes:
        return hosts[world.local[0]]
    return hosts[0 if replica_id is None else world.place(replica_id)]


def _sources(
    input_fn: Callable[..., Any],
    world: World,
    input_mode: str,
    program: AsynchronousProgram,
) -> tuple[list[Any], bool]:
    """Calls an input_fn.

    Returns:
        The source of each local replica, or one source for all replicas; and whether it
        is the latter.
    """
    takes_context = _takes_context(input_fn)
    per_replica = input_mode == "per_replica"
    count = world.num_replicas if per_replica else 1
    number = 0  # the pipeline's, unless there is one per replica
    if input_mode == "per_worker" and world.processes:
        number, count = world.processes[world.local[0]], len(set(world.processes))
    hosts = world.processes or places.hosts(world.devices)
    sources: list[Any] = []
    for pipeline_id in world.local if per_replica else (number,):
        info = InputContext(
            pipeline_id if per_replica else world.local[0],
            rehearsal.shares(world.num_replicas),
            pipeline_id + program.number * count,
            count * program.count,
            host_id=_host_id(hosts, world, pipeline_id if per_replica else None)
            + program.number,
            num_hosts=max(hosts) + program.count,
        )
        source = checks.call(input_fn, (info,) if takes_context else ())
        checks.check_source(source, input_fn, input_mode)
        sources.append(source)
        if not takes_context and isinstance(source, tf.data.Dataset):
            break  # one pipeline, dealt: each element once, even if it is shuffled
    kinds = {checks.source_kind(source) for source in sources}
    if len(kinds) > 1:
        raise errors.InputError(
            f"input_fn {checks.name_of(input_fn)} returns different kinds of input for "
            f"different replicas: {', '.join(sorted(kinds))}.",
            errors.sites_of("input_fn", input_fn),
            "return the same kind for every replica.",
        )
    shared = input_mode == "global_batch" or (per_replica and not takes_context)
    return sources, shared or not (per_replica or world.processes)


def _datasets_feed(
    made_by: Any,
    datasets: Sequence[tf.data.Dataset],
    devices: Sequence[str],
    input_mode: str,
    remainder: str,
) -> Feed:
    """Creates the feed for datasets, one per replica or one for all.

    A pipeline for replicas of several hosts stays in this process: it has one state.
    """
    middle, count = places.middle(devices), len(devices)
    if remainder == "pad" and input_mode != "global_batch" and len(datasets) > 1:
        rounds = _sited(made_by, [ends.zip_padded(datasets)], devices)
        return ShardsFeed(
            DatasetFeed(rounds, [places.cpu_beside(devices[0])]),
            lambda whole: ends.weighed(whole[0]),
            middle,
        )
    if remainder == "pad" and input_mode != "global_batch":
        padded = ends.padded(datasets[0], count - 1)
        sited = _sited(made_by, [padded], devices)
        return ShardsFeed(DatasetFeed(sited, devices), ends.weighed, middle)
    sited = _sited(made_by, datasets, devices)
    if input_mode == "global_batch":
        return ShardsFeed(
            DatasetFeed(sited, [places.cpu_beside(devices[0])]),
            lambda whole: _split(whole[0], count),
            middle,
        )
    return DatasetFeed(sited, devices)


def _sited(
    made_by: Any, datasets: Sequence[tf.data.Dataset], devices: Sequence[str]
) -> list[moving.Sited]:
    """Moves datasets to the hosts of the replicas that they feed."""
    fed = [devices] if len(datasets) == 1 else [[device] for device in devices]
    with tf.init_scope():
        sited = [
            moving.moved(iterators.without_autotuner(dataset), places.home(group))
            for dataset, group in zip(datasets, fed, strict=True)
        ]
    moving.warn_of_those_that_stay(sited, made_by)
    return sited


def _takes_context(input_fn: Callable[..., Any]) -> bool:
    """Whether an input_fn has a parameter for the InputContext."""
    required = checks.required(input_fn)
    if len(required) > 1 or any(p.kind == p.KEYWORD_ONLY for p in required):
        names = ", ".join(p.name for p in required)
        raise errors.InputError(
            f"input_fn {checks.name_of(input_fn)} requires the arguments {names}.",
            errors.sites_of("input_fn", input_fn),
            "let it take an InputContext, or nothing.",
        )
    has_context_name = any(
        p.name in _CONTEXT_NAMES and p.kind != p.KEYWORD_ONLY
        for p in checks.parameters(input_fn)[:1]
    )
    return bool(required) or has_context_name
