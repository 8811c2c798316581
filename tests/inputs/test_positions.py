# SPDX-License-Identifier: Apache-2.0
"""Inputs continue from the position in a checkpoint."""

from __future__ import annotations

import gc
import types

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.inputs import positions
from tests import helpers
from tests.cluster import as_threads


def _range(context):
    whole = tf.data.Dataset.range(60).shuffle(9, seed=2)
    return whole.shard(context.num_replicas, context.replica_id)


def _pairs(x):
    return tf.data.Dataset.from_tensors(x).repeat(2)


_INPUTS = {
    "dealt": (lambda: tf.data.Dataset.range(60).shuffle(9, seed=2).repeat(), {}),
    "map": (
        lambda: tf.data.Dataset.range(60).map(lambda x: x * 3, num_parallel_calls=2),
        {},
    ),
    "global batch": (
        lambda: tf.data.Dataset.range(60).shuffle(60).batch(4),
        {"input_mode": "global_batch"},
    ),
    "padded": (lambda: tf.data.Dataset.range(59).batch(2), {"remainder": "pad"}),
    "per replica": (lambda: _range, {}),
    # Of unknown length:
    "filter": (lambda: tf.data.Dataset.range(60).filter(lambda x: x % 2 == 0), {}),
    "interleave": (lambda: tf.data.Dataset.range(20).interleave(_pairs), {}),
    "unbatch": (
        lambda: tf.data.Dataset.range(60).batch(7).unbatch().batch(2),
        {"remainder": "pad"},
    ),
}


def _values(step, count):
    return [[np.asarray(x).tolist() for x in step()] for _ in range(count)]


@pytest.mark.parametrize("name", _INPUTS)
def test_goes_on(name, tmp_path):
    make, options = _INPUTS[name]

    def program():
        repl = helpers.make(2)
        return repl, repl.build(lambda x: x, make(), **options)

    repl, step = program()
    _values(step, 3)
    path = tf.train.Checkpoint(inputs=repl.inputs).save(str(tmp_path / "a"))
    expected = _values(step, 5)
    repl, step = program()
    tf.train.Checkpoint(inputs=repl.inputs).restore(path)  # before there is an iterator
    assert _values(step, 5) == expected
    tf.train.Checkpoint(inputs=repl.inputs).restore(path)  # and afterwards
    assert _values(step, 5) == expected


def test_records_go_on(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "records")) as writer:
        for number in range(20):
            writer.write(str(number).encode())

    def program():
        data = tf.data.TFRecordDataset(str(tmp_path / "records"))
        repl = helpers.make(2)
        return repl, repl.build(lambda x: tf.strings.to_number(x), data)

    repl, step = program()
    _values(step, 2)
    path = tf.train.Checkpoint(inputs=repl.inputs).save(str(tmp_path / "a"))
    repl, step = program()
    tf.train.Checkpoint(inputs=repl.inputs).restore(path)
    assert _values(step, 2) == [[4.0, 5.0], [6.0, 7.0]]


def test_several_inputs_are_told_apart_by_their_order(tmp_path):
    def program():
        repl = helpers.make(2)
        step_fn = lambda x: x  # noqa: E731
        small = repl.build(step_fn, tf.data.Dataset.range(0, 50))
        large = repl.build(step_fn, tf.data.Dataset.range(100, 150))
        return repl, small, large

    repl, small, large = program()
    _values(small, 1), _values(large, 3)
    path = tf.train.Checkpoint(inputs=repl.inputs).save(str(tmp_path / "a"))
    repl, small, large = program()
    tf.train.Checkpoint(inputs=repl.inputs).restore(path)
    assert _values(small, 1) == [[2, 3]]
    assert _values(large, 1) == [[106, 107]]


def test_another_number_of_replicas(tmp_path):
    repl = helpers.make(2)
    step = repl.build(lambda x: x, tf.data.Dataset.range(50))
    _values(step, 3)
    path = tf.train.Checkpoint(inputs=repl.inputs).save(str(tmp_path / "a"))
    repl = helpers.make(4)
    step = repl.build(lambda x: x, tf.data.Dataset.range(50))
    tf.train.Checkpoint(inputs=repl.inputs).restore(path)
    assert _values(step, 2) == [[6, 7, 8, 9], [10, 11, 12, 13]]


def test_pipelines_of_other_replicas_are_refused(tmp_path):
    repl = helpers.make(2)
    step = repl.build(lambda x: x, _range)
    step()
    path = tf.train.Checkpoint(inputs=repl.inputs).save(str(tmp_path / "a"))
    repl = helpers.make(3)
    step = repl.build(lambda x: x, _range)
    tf.train.Checkpoint(inputs=repl.inputs).restore(path)
    with pytest.raises(
        replicator.InputError, match=r"(?s)of 2 pipelines, but there are 3.*as many"
    ):
        step()


def test_each_host_goes_on_with_what_it_saved(monkeypatch):
    as_threads.fake_store(monkeypatch)

    class Feed:
        def __init__(self):
            self.iterators = [(iter(tf.data.Dataset.range(9)), None)]

        def next(self):
            return int(next(self.iterators[0][0]))

    def goes_on(own):
        before, after = Feed(), Feed()
        for _ in range(1 + own.process):
            before.next()
        positions.Position(after, own).deserialize(
            positions.Position(before, own).serialize()
        )
        return after.next()

    assert as_threads.together(goes_on, goes_on) == [1, 2]


@pytest.mark.parametrize("kind", ["generator", "py_function"])
def test_what_calls_python_has_no_position(kind, tmp_path):
    if kind == "generator":
        spec = tf.TensorSpec([], tf.int64)
        data = tf.data.Dataset.from_generator(lambda: range(9), output_signature=spec)
    else:
        data = tf.data.Dataset.range(9).map(
            lambda x: tf.py_function(lambda y: y, [x], tf.int64)
        )
    repl = helpers.make(2)
    step = repl.build(lambda x: x, data)
    step()
    checkpoint = tf.train.Checkpoint(inputs=repl.inputs)
    with pytest.raises(
        replicator.InputError, match=r"(?s)position of an input cannot be .*Fix: .*skip"
    ):
        checkpoint.save(str(tmp_path / "a"))


def test_inputs_that_are_gone_are_not_saved(tmp_path):
    repl = helpers.make(2)
    repl.run(lambda x: x, tf.data.Dataset.range(8))
    gc.collect()
    path = tf.train.Checkpoint(inputs=repl.inputs).save(str(tmp_path / "a"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert not any("inputs" in name for name in names), names


@pytest.mark.parametrize("done", ["saved", "restored"])
def test_positions_on_a_gpu_are_refused(done, tmp_path, monkeypatch):
    repl = helpers.make(2)
    step = repl.build(lambda x: x, tf.data.Dataset.range(50))
    _values(step, 1)
    checkpoint = tf.train.Checkpoint(inputs=repl.inputs)
    path = checkpoint.save(str(tmp_path / "a"))
    there = types.SimpleNamespace(device="/job:localhost/task:0/device:GPU:1")
    monkeypatch.setattr(positions, "_resource", lambda iterator: there)
    with pytest.raises(
        replicator.InputError, match=f"(?s)cannot be {done}.*GPU:1.*Fix: .*per_worker"
    ):
        if done == "saved":
            checkpoint.save(str(tmp_path / "b"))
        else:
            checkpoint.restore(path)
