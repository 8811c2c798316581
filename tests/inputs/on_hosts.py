# SPDX-License-Identifier: Apache-2.0
"""A program that feeds replicas on two hosts in many ways, for test_hosts.py.

Its arguments are the addresses of servers with two CPU devices each. Runs every
function of CHECKS, and prints each result as one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests import helpers

CHECKS: dict[str, Callable[[replicator.Replicator], Any]] = {}
DATA = "data.txt"  # six different lines on each host, and on the client
_Dataset = tf.data.Dataset


def check(function: Callable[[replicator.Replicator], Any]) -> Any:
    """Adds a function to CHECKS."""
    CHECKS[function.__name__] = function
    return function


def same(element: Any) -> Any:
    """The step that returns its element."""
    return element


def lines(ctx: replicator.InputContext) -> tf.data.Dataset:
    """Returns every second line of a host's file, from the first or the second."""
    names = _Dataset.from_tensors(DATA)
    return names.flat_map(tf.data.TextLineDataset).shard(2, ctx.replica_id % 2)


def numbers(step: Callable[[], Any], rounds: int) -> list[list[Any]]:
    """Returns the results of some steps, as lists."""
    return [[np.asarray(value).tolist() for value in step()] for _ in range(rounds)]


def texts(values: Any) -> list[str]:
    """Returns the strings of one step's result."""
    return [bytes(np.asarray(value).item()).decode() for value in values]


def exhausted(step: Callable[[], Any]) -> bool:
    """Runs a step until its inputs end, 100 times at most."""
    try:
        for _ in range(100):
            step()
    except tf.errors.OutOfRangeError:
        return True
    return False


@check
def files_are_those_of_the_host(repl):
    step = repl.build(same, lines)
    return [texts(step()) for _ in range(3)] + [exhausted(step)]


@check
def files_in_one_call_of_several_steps(repl):
    step = repl.build(same, lambda ctx: lines(ctx), steps_per_call=3)
    return [[line.decode() for line in np.asarray(value)] for value in step()]


@check
def files_in_a_session(repl):
    with tf.Graph().as_default():
        fetches = repl.run(same, lines)
        with helpers.monitored_session() as running:
            return [texts(running.run(fetches)) for _ in range(2)]


@check
def contexts_know_the_host(repl):
    contexts = []

    def input_fn(ctx):
        contexts.append([ctx.replica_id, ctx.host_id, ctx.num_hosts])
        return _Dataset.range(2)

    repl.run(same, input_fn)
    return contexts


@check
def started_over_the_first_step_sees_the_first_element(repl):
    step = repl.build(same, lambda ctx: lines(ctx))
    wrong = []
    for _ in range(20):
        step.initialize()
        first = texts(step())
        if first != ["a0", "a1", "b0", "b1"]:
            wrong.append(first)
        if not exhausted(step):
            wrong.append("no end")
    return wrong


@check
def a_generator_stays(repl):
    def of_generator(ctx):
        spec = tf.TensorSpec([], tf.int64)
        numbers = range(ctx.replica_id, 12, 4)
        return _Dataset.from_generator(lambda: numbers, output_signature=spec)

    step = repl.build(same, of_generator)
    return [*numbers(step, 3), exhausted(step)]


@check
def python_in_a_nested_function_stays(repl):
    def nested(ctx):
        def inner(x):
            called = tf.numpy_function(lambda y: y + os.getpid(), [x], tf.int64)
            return _Dataset.from_tensors(called).repeat(2)

        return _Dataset.range(2).interleave(inner, cycle_length=1)

    values = repl.run(same, nested)
    return [int(value) - os.getpid() for value in values]


@check
def python_in_a_session_stays(repl):
    def in_session(ctx):
        def inner(x):
            called = tf.py_function(lambda y: y + os.getpid(), [x], tf.int64)
            return _Dataset.from_tensors(called)

        return _Dataset.range(ctx.replica_id, 9).flat_map(inner)

    with tf.Graph().as_default():
        fetches = repl.run(same, in_session)
        with helpers.monitored_session() as running:
            return [int(value) - os.getpid() for value in running.run(fetches)]


@check
def a_variable_is_read_as_it_is(repl):
    scale = tf.Variable(1, dtype=tf.int64)

    def scaled(ctx):
        return _Dataset.range(1, 100).map(lambda x: x * scale)

    step = repl.build(same, scaled)
    first = numbers(step, 1)
    scale.assign(1000)
    return [first, max(numbers(step, 8)[-1])]


@check
def what_is_captured_goes_along(repl):
    keys = tf.constant(["a", "b"])
    values = tf.constant([10, 20])
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(keys, values), -1
    )
    offsets = tf.constant([1, 2])

    def looked_up(ctx):
        words = _Dataset.from_tensor_slices(["a", "b"]).enumerate()
        return words.map(lambda k, word: table.lookup(word) + offsets[k])

    return numbers(repl.build(same, looked_up), 2)


@check
def a_seeded_order_is_that_of_one_process(repl):
    def shuffled(ctx):
        return _Dataset.range(64).shuffle(64, seed=5).batch(8)

    expected = [batch.tolist() for batch in shuffled(None).as_numpy_iterator()]
    elements = numbers(repl.build(same, shuffled), 8)
    return [row == [batch] * 4 for row, batch in zip(elements, expected, strict=True)]


@check
def one_pipeline_is_dealt(repl):
    dataset = _Dataset.range(9)
    step = repl.build(same, dataset)
    return [*numbers(step, 2), exhausted(step)]


@check
def one_pipeline_is_of_the_client(repl):
    def own():
        return _Dataset.from_tensors(DATA).flat_map(tf.data.TextLineDataset)

    return [texts(repl.run(same, own)), texts(repl.run(same, own, "per_worker"))]


@check
def one_pipeline_for_one_host_is_made_there(repl):
    there = replicator.Replicator(repl.devices[2:])
    data = _Dataset.from_tensors(DATA).flat_map(tf.data.TextLineDataset)
    step = there.build(same, data.filter(lambda line: line != "b5"))
    return [texts(step()), texts(step()), exhausted(step)]


@check
def a_global_batch_is_split(repl):
    data = _Dataset.range(10).batch(6)
    step = repl.build(same, data, "global_batch")
    return [*numbers(step, 2), exhausted(step)]


@check
def arrays_are_split_and_given(repl):
    array = np.arange(6)
    split = repl.run(same, array, "global_batch")
    return [numbers(lambda: split, 1), numbers(lambda: repl.run(same, array), 1)]


@check
def rounds_are_padded(repl):
    def uneven(ctx):
        return _Dataset.range(ctx.replica_id).batch(1)

    step = repl.build(same, uneven, remainder="pad")
    return [*numbers(step, 3), exhausted(step)]


@check
def functions_run_on_the_device_of_the_replica(repl):
    def input_fn(ctx):
        return lambda: tf.strings.strip(tf.io.read_file(DATA))

    return [value[:2] for value in texts(repl.run(same, input_fn))]


def main(addresses: list[str]) -> None:
    """Runs all checks."""
    cluster = replicator.connect(addresses)
    helpers.SESSIONS.set(cluster.session_arguments())
    repl = replicator.Replicator(cluster.devices)
    for name, function in CHECKS.items():
        print(f"--- {name}", file=sys.stderr, flush=True)
        try:
            result = function(repl)
        except Exception:  # a failing one must not stop the others
            result = traceback.format_exc()
        print(json.dumps([name, result]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
