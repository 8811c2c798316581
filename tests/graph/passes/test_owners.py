# SPDX-License-Identifier: Apache-2.0
"""Variables with one owner: aliases while a step is built, one write after it.

What replicas read and write is a matter of tests/programs/writes.py.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from replicator.graph.passes import owners
from replicator.graph.same.keys import Keys
from replicator.variables import placement
from replicator.world import World
from tests.helpers import make

WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


class _Variable:
    """The parts of a variable that Aliases use."""

    def __init__(self, component: tf.Variable, owner: int) -> None:
        self.storage, self.name = types.SimpleNamespace(first=component), "v"
        self.placement = placement.Owned(owner)


def test_each_replica_has_an_alias_of_its_own_at_the_owner() -> None:
    with tf.device("CPU:1"):
        components = [tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])]
    devices = [f"/job:localhost/replica:0/task:0/device:CPU:{r}" for r in range(3)]

    @tf.function
    def function() -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        aliases = owners.Aliases(graph, World.single_process(devices))
        variables = [_Variable(component, 1) for component in components]
        alias = aliases.of(variables[0], 1)  # by itself; the others at once
        for _ in range(2):
            aliases.make(variables, range(3))
        assert aliases.of(variables[0], 1) is alias
        handles = [aliases.of(v, r) for v in variables for r in range(3)]
        assert {handle.op for handle in handles} == aliases.ops()
        assert len(aliases.ops()) == 6
        assert {handle.device for handle in handles} == {devices[1]}
        owned = [aliases.variables()[id(handle)] for handle in handles]
        assert owned == [v for v in variables for _ in range(3)]
        reads = [
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)
            for handle in handles
        ]
        assert all(read.shape == [2] for read in reads)
        assert aliases.device_for(reads[2].op) == devices[1]
        assert aliases.device_for((reads[2] + 1).op) is None
        labels = Keys()
        shared = aliases.label(labels)
        assert list(shared.values()) == [owners.Shared("v", 1, v) for v in variables]
        assert [labels.same(handles[k : k + 3]) for k in (0, 3)] == [True, True]
        assert not labels.same([handles[0], handles[3]])
        aliases.resolve()
        assert aliases.by_all == {id(read.op.inputs[0]) for read in reads}
        return reads

    np.testing.assert_array_equal(function(), [[1, 2]] * 3 + [[3, 4]] * 3)


def test_a_bucket_of_one_owner_is_unpacked_once() -> None:
    """And all replicas still read all of it."""
    repl = make(3, variables="sharded", factors=False, fusion=True)
    with repl.context():
        variables = [tf.Variable(tf.ones([4, 2])) for _ in range(6)]
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0, global_clipnorm=1))
        optimizer.build(variables)

    def step_fn() -> None:
        gradients = [v * 3.0 * (1.0 + repl.replica_id) for v in variables]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    @tf.function
    def function() -> None:
        repl.run(step_fn)

    graph = function.get_concrete_function().graph
    splits = [op for op in graph.get_operations() if op.type == "SplitV"]
    owners = {v.owner for v in variables}
    assert len(splits) == len(owners) == 3
    assert {op.device for op in splits} == set(repl.devices)
    function()
    # The mean gradient is 6 everywhere, 48 entries; the norm is clipped to 1.
    for variable in variables:
        np.testing.assert_allclose(variable, 1 - 48**-0.5 * np.ones([4, 2]), rtol=1e-6)


def _writes(repl: Any, step_fn: Any) -> list[tf.Operation]:
    """Returns the writes of a step that are not pruned."""

    @tf.function
    def function() -> None:
        repl.run(step_fn)

    graph = function.get_concrete_function().graph
    definition = graph.as_graph_def()
    needed = [op.name for op in graph.control_outputs]
    pruned = tf.compat.v1.graph_util.extract_sub_graph(definition, needed)
    return [node for node in pruned.node if node.op in WRITES]


@pytest.mark.parametrize("replicas", [2, 3])
def test_only_the_owner_writes(replicas: int) -> None:
    repl = make(replicas, variables="sharded")
    with repl.context():
        variables = [tf.Variable(tf.ones([4, 4])) for _ in range(4)]

    def step_fn() -> None:
        for k, variable in enumerate(variables):
            variable.assign_add(tf.fill([4, 4], repl.replica_id + 1.0 + k))

    writes = _writes(repl, step_fn)
    assert len(writes) == len(variables)
    assert [v.owner for v in variables] == [k % replicas for k in range(4)]
    places = sorted(repl.devices[variable.owner] for variable in variables)
    assert sorted(node.device for node in writes) == places
    repl.run(step_fn)
    mean = np.mean(range(1, replicas + 1))
    for k, variable in enumerate(variables):
        np.testing.assert_allclose(variable, np.full([4, 4], 1 + mean + k))


def test_the_write_that_is_left_waits_and_is_waited_for_as_all_were() -> None:
    world, labels = World.single_process(["/device:CPU:0"] * 3), Keys()
    with tf.Graph().as_default() as graph:
        variable = _Variable(tf.compat.v1.Variable(1.0, use_resource=True), owner=1)
        aliases = owners.Aliases(graph, world)
        value, before, writes = tf.constant(2.0), [tf.no_op() for _ in range(3)], []
        for r, op in enumerate(before):
            handle = aliases.of(variable, r)
            with tf.control_dependencies([op]):
                writes.append(tf.raw_ops.AssignVariableOp(resource=handle, value=value))
        after = []
        for write in writes:
            with tf.control_dependencies([write]):
                after.append(tf.no_op())
        handles = owners.Handles(labels, aliases.label(labels), world)
        one_by_one = [[write] for write in writes]
        others = owners.keep_owners_writes(one_by_one, range(3), handles, frozenset())
    assert others == {writes[0]: writes[1], writes[2]: writes[1]}
    assert set(writes[1].control_inputs) == set(before)
    assert [op.control_inputs for op in after] == [[writes[1]]] * 3


def test_a_replica_that_writes_more_often_is_an_error() -> None:
    repl = make(2, variables="sharded")
    with repl.context():
        v = tf.Variable([1.0], aggregation=tf.VariableAggregation.NONE)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))

    def step_fn() -> None:
        optimizer.apply_gradients([(tf.ones([1]), v)])
        if repl.replica_id == 1:
            with replicator.context.require("test").equal_updates():
                v.assign([3.0])

    with pytest.raises(errors.MismatchError) as caught:
        repl.run(step_fn)
    message = str(caught.value)
    assert "write variable" in message and "replica 1: 2 writes" in message
    assert "test_owners.py" in message and "Fix:" in message
    np.testing.assert_array_equal(v, [1.0])
