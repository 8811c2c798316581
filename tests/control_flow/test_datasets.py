# SPDX-License-Identifier: Apache-2.0
"""Datasets and their functions: no pass changes them, and none communicates inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from tests import helpers


def _map(repl: replicator.Replicator) -> Any:
    dataset = tf.data.Dataset.range(3).map(repl.all_reduce)
    return next(iter(dataset))


def _for(repl: replicator.Replicator) -> Any:
    total = tf.constant(0, tf.int64)
    for n in tf.data.Dataset.range(3):
        total += repl.all_reduce(n)
    return total


def _reduce(repl: replicator.Replicator) -> Any:
    dataset = tf.data.Dataset.range(3)
    return dataset.reduce(tf.constant(0, tf.int64), lambda a, x: repl.all_reduce(a + x))


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize(
    ("use", "op"),
    [(_map, "(Parallel)?MapDataset"), (_for, "ScanDataset"), (_reduce, "ReduceData")],
)
def test_communication_inside_a_dataset_is_refused_by_name(
    use: Callable[..., Any], op: str, mode: str
) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        return use(repl)

    with pytest.raises(
        replicator.ReplicatorError,
        match=rf"(?s)replica 0 communicates in a function that {op}.* runs, where the "
        r"other replicas cannot join.*all_reduce op=sum int64\[\] at .*test_datasets.py"
        r":\d+ in .*Fix: ",
    ):
        helpers.run(mode, repl, lambda: step)


def test_the_refusal_of_a_for_loop_says_how_to_write_it() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        return _for(repl)

    with pytest.raises(replicator.ReplicatorError, match=r"`for x in iter\(dataset\)`"):
        repl.run(step)


def test_communication_inside_an_input_fn_is_refused_by_name() -> None:
    repl = helpers.make(2)

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.range(4).map(repl.all_reduce)

    with pytest.raises(
        replicator.ContextError, match="all_reduce was called outside a step"
    ):
        repl.run(lambda x: x, input_fn)


def _functions(graph: tf.Graph) -> dict[str, bytes]:
    return {
        function.signature.name: function.SerializeToString(deterministic=True)
        for function in graph.as_graph_def().library.function
    }


def test_the_functions_of_an_input_fn_are_left_as_they_were() -> None:
    repl = helpers.make(2)
    before = []

    def input_fn() -> tf.data.Dataset:
        def turn(x: tf.Tensor) -> tf.Tensor:
            return tf.while_loop(lambda x: x < 10, lambda x: x * 2, [x + 1])[0]

        dataset = tf.data.Dataset.range(8).map(turn).filter(lambda x: x > 0)
        before.append(_functions(tf.compat.v1.get_default_graph()))
        return dataset

    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda n, x: n < 2,
            lambda n, x: (n + 1, repl.all_reduce(x)),
            [tf.constant(0), x],
        )[1]

    with tf.Graph().as_default() as graph:
        fetches = repl.run(step, input_fn)
        after = _functions(graph)
        with helpers.monitored_session() as session:
            # 1 -> 16 and 2 -> 16, on each of which the replicas agree
            assert session.run(fetches) == (64, 64)
    for functions in before:
        assert functions
        for name, text in functions.items():
            assert after[name] == text
