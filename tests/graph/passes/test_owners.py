# SPDX-License-Identifier: Apache-2.0
"""Variables with one owner: aliases while a step is built, one write after it."""

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
from tests.helpers import make, run

WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


class _Variable:
    """The parts of a variable that Aliases use."""

    def __init__(self, component: tf.Variable, owner: int) -> None:
        self.storage, self.name = types.SimpleNamespace(first=component), "v"
        self.placement = placement.Owned(owner)


def test_each_replica_has_an_alias_of_its_own_at_the_owner() -> None:
    with tf.device("CPU:1"):
        component = tf.Variable([1.0, 2.0])
    devices = [f"/job:localhost/replica:0/task:0/device:CPU:{r}" for r in range(3)]

    @tf.function
    def function() -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        aliases, variable = (
            owners.Aliases(graph, World.single_process(devices)),
            _Variable(component, 1),
        )
        handles = [aliases.of(variable, r) for r in range(3)]
        assert len({id(handle) for handle in handles}) == 3
        assert aliases.of(variable, 2) is handles[2]
        assert aliases.variables()[id(handles[0])] is variable
        assert {handle.op for handle in handles} == aliases.ops()
        read = tf.raw_ops.ReadVariableOp(resource=handles[2], dtype=tf.float32)
        assert aliases.device_for(read.op) == devices[1]
        assert aliases.device_for((read + 1).op) is None
        labels = Keys()
        shared = aliases.label(labels)
        assert list(shared.values()) == [owners.Shared("v", 1, variable)]
        assert labels.same(handles)
        aliases.resolve()
        assert aliases.by_all == {id(read.op.inputs[0])}
        return read

    np.testing.assert_array_equal(function(), [1, 2])


def test_aliases_made_at_once_are_like_those_made_one_by_one() -> None:
    with tf.device("CPU:1"):
        components = [tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])]
    devices = [f"/job:localhost/replica:0/task:0/device:CPU:{r}" for r in range(3)]

    @tf.function
    def function() -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        aliases = owners.Aliases(graph, World.single_process(devices))
        variables = [_Variable(component, 1) for component in components]
        alias = aliases.of(variables[0], 1)
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
        aliases.resolve()
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


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_reads_and_writes_stay_in_program_order(mode: str) -> None:
    """Every replica sees the same as with a component of its own."""
    repl = make(3, variables="sharded")

    def make_step() -> Any:
        first = tf.Variable([1.0], name="first")
        second = tf.Variable([[2.0]], name="second")

        def step_fn() -> list[tf.Tensor]:
            seen = [first.read_value(), second.read_value()]
            first.assign_add([repl.replica_id + 1.0])
            seen += [first.read_value(), second.read_value()]
            second.assign([[repl.replica_id * 10.0]])
            first.assign(first * 2)
            return [*seen, first.read_value(), second.read_value()]

        return step_fn

    result = run(mode, repl, make_step, steps=2)
    first = 6.0  # after one step: (1 + 2) * 2
    expected = [[first], [[10.0]], [first + 2], [[10.0]], [(first + 2) * 2], [[10.0]]]
    for leaf, value in zip(result, expected, strict=True):
        for own in leaf:
            np.testing.assert_allclose(own, value)


def test_the_write_that_is_left_waits_for_what_all_waited_for() -> None:
    world, labels = World.single_process(["/device:CPU:0"] * 3), Keys()
    with tf.Graph().as_default() as graph:
        variable = _Variable(tf.compat.v1.Variable(1.0, use_resource=True), owner=1)
        aliases = owners.Aliases(graph, world)
        value, before, writes = tf.constant(2.0), [tf.no_op() for _ in range(3)], []
        for r, op in enumerate(before):
            handle = aliases.of(variable, r)
            with tf.control_dependencies([op]):
                writes.append(tf.raw_ops.AssignVariableOp(resource=handle, value=value))
        handles = owners.Handles(labels, aliases.label(labels), world)
        one_by_one = [[write] for write in writes]
        others = owners.keep_owners_writes(one_by_one, range(3), handles, frozenset())
    assert others == {writes[0]: writes[1], writes[2]: writes[1]}
    assert set(writes[1].control_inputs) == set(before)


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@pytest.mark.parametrize("taken", [True, False])
def test_writes_in_a_conditional(mode: str, taken: bool) -> None:
    repl = make(2, variables="sharded")

    def make_step() -> Any:
        one, two = tf.Variable([1.0, 1.0]), tf.Variable([[5.0]])
        assert (one.owner, two.owner) == (0, 1)
        condition = tf.Variable(taken)

        def step_fn() -> tuple[tf.Tensor, ...]:
            def branch() -> tf.Tensor:
                one.assign_add(two[0] + [1.0, 2.0])
                two.assign_add([[one[0]]])
                return one + two[0]

            inside = tf.cond(condition, branch, lambda: tf.zeros([2]))
            return inside, one.read_value(), two.read_value()

        return step_fn

    inside, one, two = run(mode, repl, make_step)
    for r in range(2):
        if taken:
            np.testing.assert_allclose(one[r], [7, 8])
            np.testing.assert_allclose(two[r], [[12]])
            np.testing.assert_allclose(inside[r], [19, 20])
        else:
            np.testing.assert_allclose(one[r], [1, 1])
            np.testing.assert_allclose(two[r], [[5]])
            np.testing.assert_allclose(inside[r], [0, 0])


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_writes_in_a_loop_in_a_function(mode: str) -> None:
    repl = make(2, variables="sharded")

    def make_step() -> Any:
        one, two = tf.Variable([1.0]), tf.Variable([[1.0]])

        @tf.function
        def update() -> None:
            one.assign(one + two[0])

        def step_fn() -> tuple[tf.Tensor, ...]:
            def body(k: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                update()
                two.assign_add([[1.0]])
                return k + 1, total + one[0] * two[0, 0]

            _, total = tf.while_loop(lambda k, _: k < 4, body, (0, 0.0))
            return total, one.read_value(), two.read_value()

        return step_fn

    total, one, two = run(mode, repl, make_step)
    a, b, t = 1.0, 1.0, 0.0
    for _ in range(4):
        a += b
        b += 1
        t += a * b
    for r in range(2):
        np.testing.assert_allclose([total[r], one[r][0], two[r][0, 0]], [t, a, b])


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


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
@pytest.mark.parametrize("accumulator", ["of another owner", "of each replica"])
def test_one_op_that_writes_what_is_elsewhere(accumulator: str, mode: str) -> None:
    """No replica can run it for all: each gets components of owned variables."""
    facts: dict[str, Any] = {}
    if accumulator == "of each replica":
        facts["synchronization"] = tf.VariableSynchronization.ON_READ

    def trained(replicas: int) -> Any:
        repl = make(replicas, variables="sharded")

        def make_step() -> Any:
            one, two = tf.Variable([[1.0]]), tf.Variable([[2.0]], **facts)

            def step_fn() -> Any:
                with replicator.context.require("test").equal_updates():
                    written = tf.raw_ops.ResourceApplyMomentum(
                        var=one.handle,
                        accum=two.handle,
                        lr=1.0,
                        grad=tf.ones([1, 1]),
                        momentum=0.5,
                    )
                with tf.control_dependencies([written]):
                    return tf.identity(one), tf.identity(two)

            return step_fn

        return run(mode, repl, make_step, steps=3)

    (one,), (two,) = trained(1)
    for result, expected in zip(trained(3), (one, two), strict=True):
        np.testing.assert_array_equal(list(result), [expected] * 3)
