# SPDX-License-Identifier: Apache-2.0
"""Datasets that can move to another host; here, to another device of this process."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator.inputs import moving
from tests import helpers

HOME = "/job:localhost/replica:0/task:0/device:CPU:1"
_Dataset = tf.data.Dataset


def _python(x):
    return tf.numpy_function(lambda y: y, [x], tf.int64)


def _generator():
    spec = tf.TensorSpec([], tf.int64)
    return _Dataset.from_generator(lambda: range(3), output_signature=spec)


def _table(kind):
    if kind == "static":
        pair = tf.lookup.KeyValueTensorInitializer(tf.range(3), tf.range(3))
        return tf.lookup.StaticHashTable(pair, -1)
    table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.int32, -1)
    table.insert(tf.range(3), tf.range(3))
    return table


def _captured():
    offsets = tf.constant([5, 6])
    return _Dataset.range(2).map(lambda k: offsets[k])


GOES = {
    "range": lambda: _Dataset.range(3),
    "map": lambda: _Dataset.range(3).map(lambda x: x * 2),
    "dict": lambda: _Dataset.range(3).map(lambda x: {"a": x, "b": (x, x)}),
    "ragged": lambda: _Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])),
    "shuffled": lambda: _Dataset.range(30).shuffle(30, seed=3).repeat(2),
    "nested": lambda: _Dataset.range(3).interleave(_Dataset.range).batch(2),
    "cached": lambda: _Dataset.range(3).cache().prefetch(2),
    "captured": _captured,
}
STAYS = {
    "generator": (_generator, "calls Python"),
    "python": (lambda: _Dataset.range(3).map(_python), "calls Python"),
    "nested": (
        lambda: _Dataset.range(3).flat_map(lambda x: _Dataset.range(x).map(_python)),
        "calls Python",
    ),
    "branch": (
        lambda: _Dataset.range(3).map(
            lambda x: tf.cond(x > 0, lambda: _python(x), lambda: x)
        ),
        "calls Python",
    ),
}


def _values(dataset):
    return [tf.nest.flatten(element) for element in dataset]


@pytest.mark.parametrize("name", GOES)
def test_a_dataset_that_goes_has_the_same_elements(name):
    sited = moving.moved(GOES[name](), HOME)
    assert (sited.home, sited.stays) == (HOME, "")
    assert tf.data.experimental.to_variant(sited.dataset).device == HOME
    expected = _values(GOES[name]())
    with tf.device(HOME):
        elements = _values(sited.dataset)
    assert len(elements) == len(expected) > 0
    for own, other in zip(elements, expected, strict=True):
        for leaf, like in zip(own, other, strict=True):
            np.testing.assert_array_equal(*(x.numpy() for x in (leaf, like)))


@pytest.mark.parametrize("name", [name for name in GOES if name != "captured"])
def test_a_dataset_of_a_graph_goes(name):
    with tf.Graph().as_default():
        sited = moving.moved(GOES[name](), HOME)
        assert (sited.home, sited.stays) == (HOME, "")
        with tf.device(HOME):
            iterator = tf.compat.v1.data.make_initializable_iterator(sited.dataset)
            element = iterator.get_next()
        with helpers.session() as session:
            session.run(iterator.initializer)
            elements = session.run(tf.nest.flatten(element, expand_composites=True))
    tf.random.set_seed(None)  # an earlier test may have set it, and graphs have none
    expected = tf.nest.flatten(next(iter(GOES[name]())), expand_composites=True)
    for leaf, like in zip(elements, expected, strict=True):
        np.testing.assert_array_equal(leaf, like)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", STAYS)
def test_a_dataset_that_calls_python_stays(name, graph):
    make, reason = STAYS[name]
    with tf.Graph().as_default() if graph else tf.init_scope():
        dataset = make()
        sited = moving.moved(dataset, HOME)
    assert sited.home is None
    assert sited.dataset is dataset
    assert reason in sited.stays


@pytest.mark.parametrize(("kind", "stays"), [("static", False), ("mutable", True)])
def test_a_table_goes_unless_it_may_change(kind, stays):
    table = _table(kind)
    numbers = _Dataset.range(3).map(lambda x: table.lookup(tf.cast(x, tf.int32)))
    sited = moving.moved(numbers, HOME)
    assert bool(sited.stays) == stays
    assert [int(x) for x in sited.dataset] == [0, 1, 2]


def test_a_table_of_a_graph_stays():
    with tf.Graph().as_default():
        table = _table("static")
        numbers = _Dataset.range(3).map(lambda x: table.lookup(tf.cast(x, tf.int32)))
        assert "a table" in moving.moved(numbers, HOME).stays


@pytest.mark.parametrize("graph", [False, True])
def test_a_dataset_that_reads_a_variable_stays(graph):
    with tf.Graph().as_default() if graph else tf.init_scope():
        with tf.device("CPU:0"):  # where datasets can read it
            variable = tf.Variable(2, dtype=tf.int64)
        scaled = _Dataset.range(3).map(lambda x: x * variable)
        assert "reads a variable" in moving.moved(scaled, HOME).stays


@pytest.mark.parametrize("graph", [False, True])
def test_a_dataset_that_reads_a_queue_stays(graph):
    with tf.Graph().as_default() if graph else tf.init_scope():
        queue = tf.queue.FIFOQueue(3, tf.int64)
        taken = _Dataset.range(3).map(lambda _: queue.dequeue())
        assert "a queue" in moving.moved(taken, HOME).stays


def test_a_dataset_of_which_tensorflow_makes_no_graph_stays():
    assert moving.reason(b"") == "holds more than 2 GB"


def test_without_a_home_nothing_happens():
    dataset = _Dataset.range(3)
    assert moving.moved(dataset, None) == (dataset, None, "")
