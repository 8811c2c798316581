# SPDX-License-Identifier: Apache-2.0
"""Totals for variables are communicated like the gradients of a wrapped optimizer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import context, strategy
from replicator.optimizers.totals import Totals
from replicator.optimizers.wrapped import Wrapped
from replicator.variables import whole_values
from tests import helpers

_SETTINGS: dict[str, dict[str, Any]] = {
    "mirrored": {"variables": "mirrored"},
    "owned": {"variables": "sharded"},
    "parts": {"strategy": strategy.PartitionedPS()},
    "proxies": {"strategy": strategy.PS(local_proxy_variable=True)},
    "cast": {"strategy": strategy.AllReduce(compressor="bf16")},
    "feedback": {"strategy": strategy.AllReduce(compressor="ef(topk)")},
    "parts in pieces": {"strategy": strategy.PartitionedAR()},
}
_SHAPES = ([6, 4], [5], [4, 8])


def _variables(repl: replicator.Replicator) -> list[Any]:
    with repl.context():
        return [tf.Variable(tf.zeros(shape)) for shape in _SHAPES]


def _summands(replica_id: int) -> list[tf.Tensor]:
    rng = np.random.default_rng(replica_id)
    return [tf.constant(rng.normal(size=shape), tf.float32) for shape in _SHAPES]


def _by_optimizer(setting: str, **options: Any) -> tuple[Any, Any]:
    repl = helpers.make(2, **_SETTINGS[setting])
    variables = _variables(repl)
    with repl.context():
        optimizer = repl.wrap_optimizer(keras.optimizers.SGD(1.0), op="sum", **options)

    def step():
        optimizer.apply(_summands(repl.replica_id), variables)

    for _ in range(3):
        repl.run(step)
    return repl, [variable.numpy() for variable in variables]


def _by_totals(setting: str, make: Any = None) -> tuple[Any, Any]:
    repl = helpers.make(2, **_SETTINGS[setting])
    variables = _variables(repl)
    totals = Totals("a test", {} if make is None else make(repl, variables))

    def step():
        writes = whole_values.Writes()
        sums = totals.add_up(_summands(repl.replica_id), variables)
        for variable, total in zip(variables, sums, strict=True):
            with writes.writing([variable]):
                variable.assign_sub(total)
        writes.refresh()

    for _ in range(3):
        repl.run(step)
    return repl, [variable.numpy() for variable in variables]


def _messages(repl: Any) -> list[Any]:
    # Plans count copies that nothing but a joined total reads, which do not run.
    return [(row.primitive, row.operands, row.algorithm) for row in repl.plan]


@pytest.mark.parametrize("setting", _SETTINGS)
def test_totals_and_their_messages_are_those_of_an_optimizer(setting):
    first, wanted = _by_optimizer(setting)
    second, values = _by_totals(setting)
    for value, want in zip(values, wanted, strict=True):
        np.testing.assert_array_equal(value, want)
    assert _messages(second) == _messages(first)


def test_a_wrapped_optimizer_says_how_its_variables_are_compressed():
    def make(repl, variables):
        with repl.context():
            plain = keras.optimizers.SGD(1.0)
        optimizer = repl.wrap_optimizer(plain, compressor="bf16")
        assert isinstance(optimizer, Wrapped)
        compression = optimizer._replicator_combiner.compression
        return {id(variable): compression for variable in variables}

    first, wanted = _by_optimizer("mirrored", compressor="bf16")
    second, values = _by_totals("mirrored", make)
    for value, want in zip(values, wanted, strict=True):
        np.testing.assert_array_equal(value, want)
    assert _messages(second) == _messages(first)


def test_what_belongs_to_no_variable_is_summed_with_the_rest():
    repl = helpers.make(2, build="trace")
    (variable, *_) = _variables(repl)
    totals = Totals("a test", {})

    def step():
        own = context.require("a test").replica_id + 1
        tensors = [tf.fill([6, 4], float(own)), tf.constant(own), tf.constant([own])]
        return tuple(totals.add_up(tensors, [variable, None, variable]))

    for large, count, other in zip(*repl.run(step), strict=True):
        np.testing.assert_array_equal(large, np.full([6, 4], 3.0))
        assert (int(count), other.numpy().tolist()) == (3, [3])


def test_memory_is_the_same_in_all_builds_of_a_program():
    repl = helpers.make(2, **_SETTINGS["feedback"])
    variables = _variables(repl)
    totals = Totals("a test", {})

    def run(examples):
        def step():
            totals.add_up(_summands(repl.replica_id), variables)
            return examples

        repl.run(step)

    run(1)
    kept = [v.ref() for v in totals.memory.variables]
    run(2)
    assert kept and [v.ref() for v in totals.memory.variables] == kept
