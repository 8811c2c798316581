# SPDX-License-Identifier: Apache-2.0
"""Differences that keep replicas from being copies are found, and both lines named."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import errors
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


def test_constants_that_differ(repl: replicator.Replicator) -> None:
    calls: list[int] = []

    def step() -> tf.Tensor:
        calls.append(1)
        return tf.constant(len(calls)) + 1

    message = refused(repl, step)
    assert "not the same constant" in message
    for r in (0, 1):
        assert f"replica {r}: Const replica_{r}/" in message
    assert message.count("test_proof.py") == 2


def test_ops_that_differ(repl: replicator.Replicator) -> None:
    functions = iter([tf.sin, tf.cos])
    message = refused(repl, lambda x: next(functions)(x), lambda: tf.constant(1.0))
    assert "not the same op" in message
    assert "replica 0: Sin" in message
    assert "replica 1: Cos" in message


def test_inputs_that_differ(repl: replicator.Replicator) -> None:
    operands = iter([0, 1])

    def step(x: tf.Tensor) -> tf.Tensor:
        y = [tf.sin(x), tf.cos(x)]
        tf.print(y)
        return tf.exp(y[next(operands)])

    assert "not the same inputs" in refused(repl, step, lambda: tf.constant(1.0))


def test_results_that_differ(repl: replicator.Replicator) -> None:
    which = iter([0, 1])

    def step(x: tf.Tensor) -> tf.Tensor:
        y = [tf.sin(x), tf.cos(x)]
        tf.print(y)
        return y[next(which)]

    message = refused(repl, step, lambda: tf.constant(1.0))
    assert "what step_fn returns" in message


def test_more_ops_on_one_replica(repl: replicator.Replicator) -> None:
    calls: list[int] = []

    def step(x: tf.Tensor) -> tf.Tensor:
        calls.append(1)
        y = x + 1.0
        if len(calls) == 2:
            tf.print("twice")
        return y

    message = refused(repl, step, lambda: tf.constant(1.0))
    assert "replica 1 builds ops that replica 0 does not" in message
    assert "replica 1: " in message


def test_differences_in_a_branch(repl: replicator.Replicator) -> None:
    calls: list[int] = []

    def step(x: tf.Tensor) -> tf.Tensor:
        calls.append(1)
        number = float(len(calls))
        return tf.cond(x > 0.0, lambda: x + number, lambda: x)

    assert "not the same constant" in refused(repl, step, lambda: tf.constant(1.0))


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("counted", [0, 2])
@pytest.mark.parametrize("place", ["step", "branch"])
def test_seeds_that_differ(
    repl: replicator.Replicator, seed: int | None, counted: int, place: str
) -> None:
    """Under a global seed, ops without a seed get counted ones, which may differ."""
    tf.random.set_seed(seed)
    seeds = iter([3, 10])

    def step() -> Any:
        draws = [tf.random.normal([]) for _ in range(counted)]
        own = next(seeds)
        if place == "step":
            return draws, tf.random.normal([], seed=own)
        draw = functools.partial(tf.random.normal, [], seed=own)
        return draws, tf.cond(repl.all_reduce(1.0) > 0.0, draw, lambda: 0.0)

    try:
        assert "not the same seed" in refused(repl, step)
    finally:
        tf.random.set_seed(None)


@pytest.mark.parametrize("seed", [0, 7])
def test_counted_seeds_are_those_of_each_replica(seed: int) -> None:
    def drawn(build: str) -> list[float]:
        tf.random.set_seed(seed)

        def step() -> Any:
            return [tf.random.normal([]) for _ in range(2)], tf.random.uniform(
                [], seed=4
            )

        try:
            results = helpers.make(4, build=build).run(step)
        finally:
            tf.random.set_seed(None)
        return [float(x) for x in tf.nest.flatten(results)]

    clone = drawn("clone")
    assert clone == drawn("trace")
    assert len(set(clone)) == len(clone)


def test_tensors_kept_for_the_next_replica(repl: replicator.Replicator) -> None:
    kept: list[tf.Tensor] = []

    def step(x: tf.Tensor) -> tf.Tensor:
        kept.append(tf.sin(x))
        return kept[0] * 2.0

    message = refused(repl, step, lambda: tf.constant(1.0))
    assert "replica 1 uses an op that replica 0 built" in message


def _drawn(x: tf.Tensor) -> tf.Tensor:
    return tf.random.uniform([]) + 1.0


def _after_a_print(x: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.print("kept")]):
        return tf.constant(1.0)


def _of_a_function(x: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda: tf.ones([]))() + 1.0


@pytest.mark.parametrize("make", [_drawn, _after_a_print, _of_a_function])
def test_only_tensors_computed_from_constants_may_be_kept(
    repl: replicator.Replicator, make: Any
) -> None:
    kept: list[tf.Tensor] = []

    def step(x: tf.Tensor) -> tf.Tensor:
        if not kept:
            kept.append(make(x))
        return kept[0] * x

    message = refused(repl, step, lambda: tf.constant(1.0))
    assert "replica 1 uses an op that replica 0 built" in message
    assert "build the layer that keeps them before the step" in message


def test_devices_that_do_not_correspond(repl: replicator.Replicator) -> None:
    devices = iter(["CPU:5", "CPU:6"])

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.device(next(devices)):
            return tf.sin(x)

    message = refused(repl, step, lambda: tf.constant(1.0))
    assert "not on corresponding devices" in message


def test_a_device_of_the_users_own_is_kept(repl: replicator.Replicator) -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:5"):
            return tf.sin(x)

    results = repl.run(step, lambda: tf.constant(1.0))
    assert len({float(x) for x in results}) == 1


def test_shapes_of_inputs_that_differ(repl: replicator.Replicator) -> None:
    def input_fn(ctx: replicator.InputContext) -> tf.Tensor:
        return tf.zeros([3 if ctx.replica_id == 2 else 4])

    message = refused(repl, lambda x: x + 1.0, input_fn)
    assert "replica 0: (4,)" in message
    assert "replica 2: (3,)" in message


ASKED: dict[str, Any] = {
    "replica_id": lambda repl, x: x * float(repl.replica_id),
    "logical_device": lambda repl, x: repl.logical_device(0),
    "all_gather_object": lambda repl, x: repl.all_gather_object(1),
    "send": lambda repl, x: repl.send(x, 0),
    "recv": lambda repl, x: repl.recv(x, 2),
    "group": lambda repl, x: repl.all_reduce(x, group=[0, 1]),
    "partition": lambda repl, x: repl.all_reduce(x, group=repl.groups([[0, 1], [2]])),
    "tf.distribute": lambda repl, x: (
        tf.distribute.get_replica_context().replica_id_in_sync_group
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_a_copy_could_not_know(repl: replicator.Replicator, name: str) -> None:
    message = refused(repl, lambda x: ASKED[name](repl, x), lambda: tf.constant(1.0))
    assert 'with build="clone"' in message
    assert "the other 1 are copies" in message
    assert "test_proof.py" in message


CALLS: dict[str, tuple[Any, str]] = {
    "root": (lambda repl, x: repl.broadcast(x, root=2), "with the root 2"),
    "uneven": (lambda repl, x: repl.reduce_scatter(x), "slices that differ in size"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_do_not_tell_those_of_copies(
    repl: replicator.Replicator, name: str
) -> None:
    call, said = CALLS[name]
    message = refused(repl, lambda x: call(repl, x), lambda: tf.zeros([5]))
    assert said in message


def test_gradients_of_a_root_are_not_those_of_the_others(
    repl: replicator.Replicator,
) -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.scatter(x, root=0, axis=0)
        return tape.gradient(y, x)

    assert "receipt of gather" in refused(repl, step, lambda: tf.ones([3]))


def test_python_functions_cannot_be_compared(repl: replicator.Replicator) -> None:
    numbers = iter([1.0, 2.0])

    def step(x: tf.Tensor) -> tf.Tensor:
        number = next(numbers)
        return tf.py_function(lambda y: y + number, [x], tf.float32)

    assert "number, to which Python functions refer" in refused(
        repl, step, lambda: tf.constant(1.0)
    )
