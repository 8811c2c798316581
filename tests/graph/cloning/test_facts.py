# SPDX-License-Identifier: Apache-2.0
"""What differs between copies: what is given to them, and what a step cannot ask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from replicator.graph.cloning import facts
from replicator.graph.ir import differing
from replicator.graph.passes import random
from tests import helpers


@pytest.fixture
def repl() -> replicator.Replicator:
    return helpers.make(3, build="clone")


def refused(repl: replicator.Replicator, step: Any, input_fn: Any = None) -> str:
    """Returns the message of the error that refuses a step."""
    with pytest.raises(errors.CloneError) as info:
        repl.run(step, input_fn)
    assert 'build="trace"' in str(info.value)
    assert "Fix: " in str(info.value)
    return str(info.value)


ASKED: dict[str, Any] = {
    "replica_id": lambda repl, x: x * float(repl.replica_id),
    "logical_device": lambda repl, x: repl.logical_device(0),
    "all_gather_object": lambda repl, x: repl.all_gather_object(1),
    "send": lambda repl, x: repl.send(x, 0),
    "recv": lambda repl, x: repl.recv(x, 2),
    "group": lambda repl, x: repl.all_reduce(x, group=[0, 1]),
    "partition": lambda repl, x: repl.all_reduce(x, group=repl.groups([[0, 1], [2]])),
    "reduce": lambda repl, x: repl.reduce(x, root=0),
    "gather": lambda repl, x: repl.gather(x, root=2),
    "specs": lambda repl, x: repl.broadcast(tf.TensorSpec([]), root=0),
    "map_reduce": lambda repl, x: repl.map_reduce(tf.sin, [x, x]),
    "tf.distribute": lambda repl, x: (
        tf.distribute.get_replica_context().replica_id_in_sync_group
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_a_copy_could_not_know(repl: replicator.Replicator, name: str) -> None:
    message = refused(repl, lambda x: ASKED[name](repl, x), lambda: tf.constant(1.0))
    assert 'with build="clone"' in message
    assert "2 of 3 replicas are copies" in message
    assert "test_facts.py" in message


def test_two_replicas_are_copies_too() -> None:
    repl = helpers.make(2, build="clone")
    assert "replica_id cannot be known" in refused(repl, lambda: repl.replica_id)


def test_gradients_of_a_root_are_not_those_of_the_others(
    repl: replicator.Replicator,
) -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.scatter(x, root=0, axis=0)
        return tape.gradient(y, x)

    message = refused(repl, step, lambda: tf.ones([3]))
    assert "which replica is the root cannot be known" in message


def test_shapes_of_inputs_that_differ(repl: replicator.Replicator) -> None:
    def input_fn(ctx: replicator.InputContext) -> tf.Tensor:
        return tf.zeros([3 if ctx.replica_id == 2 else 4])

    message = refused(repl, lambda x: x + 1.0, input_fn)
    assert "replica 0: float32 (4,)" in message
    assert "replica 2: float32 (3,)" in message


def test_dtypes_of_inputs_that_differ(repl: replicator.Replicator) -> None:
    args = replicator.PerReplica(1, 1, 2.0)
    with pytest.raises(
        errors.CloneError, match=r"replica 0: int32 \(\)\n.*replica 2: float32 \(\)"
    ):
        repl.run(lambda x: x, args=(args,))


def test_static_shapes_that_a_copy_does_not_have(repl: replicator.Replicator) -> None:
    """Python may have read them off the first replica's tensors."""

    def step() -> tf.Tensor:
        rows = differing.constant([1, 3, 2], 0)
        x = tf.ones([4])[:rows]
        return tf.reduce_sum(x) / x.shape[0]

    message = refused(repl, step)
    assert "has not the static shapes of the first replica" in message
    assert "test_facts.py" in message


def test_what_has_a_name_of_its_own_is_not_copied(repl: replicator.Replicator) -> None:
    v1 = tf.compat.v1

    def fed() -> tf.Tensor:
        return v1.placeholder_with_default(1.0, []) + v1.placeholder(tf.float32, [])

    def shared() -> tf.Tensor:
        return tf.queue.FIFOQueue(1, [tf.float32], shared_name="one").size()

    for step, said in ((fed, "a placeholder"), (shared, "a resource with a name")):
        with tf.Graph().as_default():
            message = refused(repl, step)
        assert f"cannot create {said}" in message
        assert "test_facts.py" in message


def test_a_device_of_the_users_own_is_kept(repl: replicator.Replicator) -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:5"):
            return tf.sin(x)

    with tf.Graph().as_default():
        repl.run(lambda x: (step(x), tf.cos(x)), lambda: tf.constant(1.0))
        ops = tf.compat.v1.get_default_graph().get_operations()
        sines = [op.device[-5:] for op in ops if op.type == "Sin"]
        cosines = [op.device[-5:] for op in ops if op.type == "Cos"]
    assert (sines, cosines) == (["CPU:5"] * 3, ["CPU:0", "CPU:1", "CPU:2"])


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize("build", ["trace", "clone"])
def test_seeds_are_counted_alike_on_all_replicas(seed: int | None, build: Any) -> None:
    def drawn(num_replicas: int) -> list[list[int]]:
        tf.random.set_seed(seed)

        def step() -> Any:
            return tf.random.normal([]), tf.random.normal([], seed=4)

        try:
            with tf.Graph().as_default() as graph:
                tf.random.set_seed(seed)
                helpers.make(num_replicas, build=build).run(step)
                draws = [op for op in graph.get_operations() if "Normal" in op.type]
        finally:
            tf.random.set_seed(None)
        seeds = [op.get_attr("seed2") for op in draws]
        return [seeds[k : k + 2] for k in range(0, len(seeds), 2)]

    ((one, two),) = drawn(1)
    assert drawn(4) == [
        [0 if seed is None else one + r * random.OFFSET, two + r * random.OFFSET]
        for r in range(4)
    ]


def test_text_has_the_names_and_devices_of_the_copy() -> None:
    original = facts.Original(
        facts.Replica(1, "/device:CPU:1", "replica_1/"),
        ("/device:CPU:1", "/device:CPU:2"),
        lambda op: False,
    )
    new = facts.New(
        original,
        facts.Replica(2, "/device:CPU:2", "replica_2/"),
        {
            "net/add_1": "replica_2/outside/net/add_1",
            "inputs/Next:1": "inputs/Next_1:0",
        },
    )
    for text, other in {
        b"x (replica_1/x:0) =": b"x (replica_2/x:0) =",
        b"replica_1": b"replica_1",
        b"/device:CPU:1, /device:CPU:10": b"/device:CPU:2, /device:CPU:10",
        b"y (net/add_1:0) = ": b"y (replica_2/outside/net/add_1:0) = ",
        b"net/add_10, a/net/add_1, \xff\x00": b"net/add_10, a/net/add_1, \xff\x00",
        b"inputs/Next:1, inputs/Next:2": b"inputs/Next_1:0, inputs/Next:2",
    }.items():
        assert new.text(text) == other


def test_text_of_users_stays_as_it_is(repl: replicator.Replicator) -> None:
    """Names are given to assertions only."""
    for value in repl.run(lambda: tf.constant("replica_0/file") + ""):
        assert value == b"replica_0/file"


def test_hosts_have_their_own_cpus() -> None:
    hosts = [f"/job:worker/replica:0/task:{k}/device:" for k in range(2)]
    devices = [f"{hosts[0]}GPU:0", f"{hosts[0]}GPU:1", f"{hosts[1]}GPU:0"]
    original = facts.Original(
        facts.Replica(0, devices[0], "replica_0/"), devices, lambda op: False
    )
    assert original.places(devices[2]) == {
        devices[0]: devices[2],
        f"{hosts[0]}CPU:0": f"{hosts[1]}CPU:0",
    }
    with tf.Graph().as_default():
        with tf.device(f"{hosts[0]}CPU:0"):
            op = tf.constant(1.0).op
        assert original.moves(op)
        one_host = facts.Original(original.replica, devices[:2], original.is_kept)
        assert not one_host.moves(op)
    np.testing.assert_array_equal(list(original.places("")), [devices[0]])
