# SPDX-License-Identifier: Apache-2.0
"""The replicas of the world, as opposed to those that are built here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import context
from replicator.graph.ir import placeholder
from replicator.graph.order.effects import Ledger
from replicator.options import Options
from replicator.primitives import all_reduce, groups, reduce, table
from replicator.step import building, known, registry
from replicator.step.requests import Request
from replicator.variables import locks
from replicator.variables.creation import VariableFactory
from replicator.world import World
from tests import helpers

DEVICES = ("/device:CPU:0", "/device:CPU:1", "/device:CPU:2")


def test_a_world_that_one_process_builds() -> None:
    world = World.single_process(DEVICES)
    assert world == World(3, (0, 1, 2), DEVICES)
    assert (
        world.local == world.replica_ids and world.num_local == world.num_replicas == 3
    )
    assert [world.device(r) for r in world.replica_ids] == list(DEVICES)


def test_ids_are_those_of_the_world_and_lists_are_of_local_replicas() -> None:
    world = World(8, (2, 3, 6), DEVICES)
    assert world.num_replicas == 8 and world.replica_ids == tuple(range(8))
    assert world.num_local == 3
    assert [world.local[world.place(r)] for r in world.local] == [2, 3, 6]
    assert world.device(6) == DEVICES[2]


@pytest.mark.parametrize(
    ("num_replicas", "local", "devices"),
    [
        (2, (0, 1, 2), DEVICES),  # more than there are
        (8, (2, 6, 3), DEVICES),  # not in the order of their ids
        (8, (2, 2, 3), DEVICES),  # twice
        (8, (-1, 2, 3), DEVICES),
        (8, (2, 3), DEVICES),  # one device too many
    ],
)
def test_what_is_no_world(num_replicas: int, local: Any, devices: Any) -> None:
    with pytest.raises(AssertionError):
        World(num_replicas, local, devices)


# --- Replicas 2 and 3 of 4, with the others built elsewhere ---------------------------


class Part:
    """Builds steps for two replicas of a world of four."""

    def __init__(self, **options: Any) -> None:
        lock = locks.StepLock()
        world = World(4, (2, 3), helpers.make(2).devices)
        self.factory = VariableFactory(world, lock)
        self.settings = known.Settings(
            world, Options(**options), self.factory, Ledger(), lock
        )
        self.steps = registry.Steps(self.settings, lambda plan: None)

    def run(self, step_fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Runs a step on the two."""
        return self.steps.run(Request(step_fn, *args, **options))


def replica() -> context.ReplicaContext:
    return context.require("the test")


def test_each_local_replica_is_built_under_its_own_id_and_device() -> None:
    seen = []

    def step_fn() -> tf.Tensor:
        seen.append((replica().replica_id, replica().num_replicas, replica().device))
        return tf.constant(replica().replica_id)

    part = Part()
    results = part.run(step_fn)
    devices = part.settings.world.devices
    assert seen == [(2, 4, devices[0]), (3, 4, devices[1])]
    assert isinstance(results, replicator.PerReplica)
    assert [int(x) for x in results] == [2, 3]


def test_input_fns_learn_their_place_in_the_world() -> None:
    seen = []

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        seen.append(ctx)
        shard = tf.data.Dataset.range(8).shard(ctx.num_pipelines, ctx.pipeline_id)
        return shard.batch(ctx.per_replica_batch_size(4))

    results = Part().run(lambda x: x, input_fn)
    assert seen == [replicator.InputContext(r, 4, r, 4) for r in (2, 3)]
    assert [x.numpy().tolist() for x in results] == [[2], [3]]


def test_a_per_replica_has_a_value_for_each_local_replica() -> None:
    part = Part()
    argument = replicator.PerReplica(10.0, 20.0)
    assert [float(x) for x in part.run(lambda x: x + 1, args=[argument])] == [
        11.0,
        21.0,
    ]
    of_all = replicator.PerReplica(1.0, 2.0, 3.0, 4.0)
    with pytest.raises(replicator.ArgumentError, match="PerReplica of 4 values"):
        part.run(lambda x: x, args=[of_all])


def test_groups_are_of_the_world() -> None:
    def step_fn(x: tf.Tensor) -> tf.Tensor:
        assert groups.members("all_reduce", None) == (0, 1, 2, 3)
        with pytest.raises(replicator.ArgumentError, match="in which it is not"):
            groups.members("all_reduce", [0, 1])
        with pytest.raises(replicator.ArgumentError, match="4 replicas"):
            groups.members("all_reduce", [3, 4])
        halves = groups.make_partition([[0, 1], [2, 3]], replica().num_replicas)
        return all_reduce.all_reduce(x, "mean", group=halves)

    argument = replicator.PerReplica(10.0, 20.0)
    assert [float(x) for x in Part().run(step_fn, args=[argument])] == [15.0, 15.0]


def test_means_are_those_of_the_world() -> None:
    """A mean's gradient, reduced to one replica, is divided by the world's size."""
    graph = tf.Graph()
    world = World(4, (2, 3), DEVICES[:2])
    build = context.Build(
        world, Options(), graph, Ledger(), Mock(), table.GRADIENTS, table.FACTS
    )
    one = context.ReplicaContext(build, 2)
    with graph.as_default(), context.building(one), tf.GradientTape() as tape:
        x = tf.constant(8.0)
        tape.watch(x)
        mean = reduce.reduce(x, 2, "mean")
        gradient = tape.gradient(mean, x)
    sites = [op for op in graph.get_operations() if placeholder.read(op)]
    calls = [placeholder.read(op) for op in sites]
    assert [call.group for call in calls if call] == [world.replica_ids] * 2
    assert [call.replica_id for call in calls if call] == [2, 2]
    received = sites[1].outputs[0]
    with tf.compat.v1.Session(graph=graph) as session:
        assert session.run(gradient, {received: 2.0}) == 0.5


def test_variables_have_a_component_for_each_local_replica() -> None:
    part = Part()
    with building.replicated_variables(part.factory):
        v = tf.Variable([1.0, 2.0])
        count = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    devices = part.settings.world.devices
    assert [one.device for one in v.components] == list(devices)

    def step_fn() -> tf.Tensor:
        count.assign_add(float(replica().replica_id))
        return v + float(replica().replica_id)

    np.testing.assert_array_equal(part.run(step_fn), [[3, 4], [4, 5]])
    assert [float(one) for one in count.components] == [2.0, 3.0]
    v.assign([5.0, 6.0])
    np.testing.assert_array_equal([one.numpy() for one in v.components], [[5, 6]] * 2)


def test_replicas_draw_by_their_ids_in_the_world() -> None:
    """As in one process that builds all four, whose seeds are offset by the ids."""

    def step_fn() -> tf.Tensor:
        return tf.random.uniform([3], seed=7)

    tf.random.set_seed(1)
    of_all = helpers.make(4).run(step_fn)
    tf.random.set_seed(1)
    np.testing.assert_array_equal(Part().run(step_fn), of_all[2:])
