# SPDX-License-Identifier: Apache-2.0
"""Inputs that end on one host first: the step ends on all, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import Replicator

Data = Callable[[replicator.InputContext], tf.data.Dataset]


def _sizes(*sizes: int) -> Data:
    """Returns an input_fn whose datasets have a given size on each host."""
    return lambda ctx: tf.data.Dataset.range(sizes[ctx.host_id])


def _unknown(*sizes: int) -> Data:
    """The same, with unknown sizes."""
    return lambda ctx: tf.data.Dataset.range(9).filter(lambda x: x < sizes[ctx.host_id])


def epochs(repl: Replicator, inputs: Any, steps: int = 1, mode: str = "per_replica"):
    """Returns the steps of two epochs, and the variable that counts them."""
    with repl.context():
        count = tf.Variable(0)

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        repl.all_reduce(tf.cast(count, tf.float32))  # needs no input
        count.assign_add(1)
        return repl.all_reduce(tf.reduce_sum(x))

    step = repl.build(step_fn, inputs, mode, steps)
    counts = []
    for _ in range(2):
        sums: list[Any] = []
        try:
            while True:
                sums.append(step()[0].numpy().tolist())
        except tf.errors.OutOfRangeError:
            counts.append([sums, int(count)])
        step.initialize()
    return counts


def gathers(repl: Replicator, inputs: Any) -> int:
    """Returns how often a step gathers whether there are inputs."""
    step = tf.function(lambda: repl.run(lambda x: repl.all_reduce(x), inputs))
    ops = step.get_concrete_function().graph.get_operations()
    return sum(op.type == "CollectiveGatherV2" for op in ops)


def input_ends(cluster: Any) -> dict[str, Any]:
    """Returns the results of steps whose inputs end, by the kind of input."""
    repl = Replicator(cluster.devices)
    either = tf.data.Dataset.range(9).filter(lambda x: x < 7)  # is dealt
    return {
        "known": epochs(repl, _sizes(3, 5)),
        "known, first": epochs(repl, _sizes(5, 3)),
        "none": epochs(repl, _sizes(0, 2)),
        "unknown": epochs(repl, _unknown(4, 2)),
        "mixed": epochs(
            repl, lambda ctx: (_unknown if ctx.host_id else _sizes)(2, 4)(ctx)
        ),
        "equal": epochs(repl, _sizes(3, 3)),
        "dealt": epochs(repl, either),
        "split": epochs(repl, either.batch(4), mode="global_batch"),
        "per worker": epochs(repl, _sizes(2, 4), mode="per_worker"),
        "loop": epochs(repl, _sizes(5, 8), steps=2),
        "gathers": [
            gathers(repl, data)
            for data in (
                _sizes(3, 5),
                _unknown(3, 3),
                _sizes(3, 3),
                lambda ctx: tf.data.Dataset.range(3 + ctx.host_id).repeat(),
                tf.data.Dataset.range(6),
                either,
            )
        ],
    }


# --- Tests ----------------------------------------------------------------------------


# The sums of both hosts in the steps of an epoch.
_STEPS: dict[str, list[Any]] = {
    "known": [0, 2, 4],
    "known, first": [0, 2, 4],
    "none": [],
    "unknown": [0, 2],
    "mixed": [0, 2],
    "equal": [0, 2, 4],
    "dealt": [1, 5, 9],  # the seventh element fills no round
    "split": [6, 15],
    "per worker": [0, 2],
}


@pytest.fixture(scope="module")
def found(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each host's results, by the kind of input."""
    return [results["test_inputs_end.input_ends"] for results in told]


@pytest.mark.parametrize("name", _STEPS)
def test_all_hosts_end_together(found: list[dict[str, Any]], name: str) -> None:
    sums = _STEPS[name]
    for own in found:
        # The variable counts the complete steps; a second epoch equals the first.
        assert own[name] == [[sums, len(sums)], [sums, 2 * len(sums)]]


def test_a_loop_of_steps_ends_within_a_call(found: list[dict[str, Any]]) -> None:
    """Two steps per call, of five: the fifth is done, and its call raises."""
    for own in found:
        assert own["loop"] == [[[[0, 2], [4, 6]], 5], [[[0, 2], [4, 6]], 10]]


def test_hosts_ask_only_where_it_is_not_certain(found: list[dict[str, Any]]) -> None:
    """Unequal and unknown lengths cost a gather; equal and endless ones do not."""
    for own in found:
        assert own["gathers"] == [1, 1, 0, 0, 0, 1]
