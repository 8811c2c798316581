"""PerReplica is a tuple that survives whatever rebuilds tuples."""

from __future__ import annotations

import collections
import copy
import pickle

import numpy as np
import pytest
import tensorflow as tf

from replicator import PerReplica, values
from tests import helpers


@pytest.mark.parametrize("count", [1, 2, 3])
def test_takes_values_one_by_one_or_all_at_once(count):
    items = list(range(count))
    assert PerReplica(*items) == PerReplica(items) == PerReplica(tuple(items))
    assert len(PerReplica(*items)) == count


def test_is_a_tuple_and_says_what_it_is():
    value = PerReplica(1.0, 2.0)
    first, second = value
    assert isinstance(value, tuple)
    assert (first, second, value[-1]) == (1.0, 2.0, 2.0)
    assert repr(value) == "PerReplica(1.0, 2.0)"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("item", [1.0, (1, 2), [3], {"a": 4}], ids=repr)
@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy"])
def test_survives_copies(how, item, count):
    again = {
        "pickle": lambda v: pickle.loads(pickle.dumps(v)),
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
    }[how]
    value = PerReplica([item] * count)
    assert type(again(value)) is PerReplica
    assert again(value) == value


@pytest.mark.parametrize("count", [1, 2])
def test_survives_tf_nest(count):
    structure = {"loss": PerReplica([tf.constant(2.0)] * count)}
    mapped = tf.nest.map_structure(lambda t: t * 2, structure)
    assert type(mapped["loss"]) is PerReplica
    assert [float(t) for t in mapped["loss"]] == [4.0] * count
    flat = tf.nest.flatten(structure)
    packed = tf.nest.pack_sequence_as(structure, flat)
    assert type(packed["loss"]) is PerReplica
    tf.nest.assert_same_structure(structure, mapped)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.constant([1.0, 2.0]),
        lambda: tf.sparse.from_dense([1.0, 0.0]),
        lambda: tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])),
        lambda: tf.ragged.constant([[1], [2, 3]]),
    ],
    ids=["dense", "sparse", "slices", "ragged"],
)
def test_survives_session_run(make, count):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fetches = {"x": [PerReplica([make() for _ in range(count)])]}
        fetched = session.run(fetches)["x"][0]
        alone = session.run(make())
    assert type(fetched) is PerReplica
    assert len(fetched) == count
    assert all(type(own) is type(alone) for own in fetched)


@pytest.mark.parametrize("count", [1, 2])
def test_a_function_returns_its_values(count):
    """TensorFlow makes plain tuples of what a function returns."""
    returned = tf.function(lambda: PerReplica([tf.constant(3)] * count))()
    assert [int(t) for t in returned] == [3] * count


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_can_be_reduced_as_in_the_paper(mode, replicas):
    repl = helpers.make(replicas)

    def step_fn():
        return tf.constant(float(repl.replica_id))

    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            mean = session.run(tf.reduce_mean(repl.run(step_fn)))
    else:
        call = repl.build(step_fn)

        def reduced():
            return tf.reduce_mean(call())

        mean = (tf.function(reduced) if mode == "function" else reduced)()
    assert mean == np.mean(range(replicas))


def test_transpose_puts_the_replicas_at_the_leaves():
    turned = values.transpose([{"a": 1, "b": [2, None]}, {"a": 3, "b": [4, None]}])
    assert turned == {"a": (1, 3), "b": [(2, 4), (None, None)]}
    assert type(turned["a"]) is PerReplica
    assert type(turned["b"][1]) is PerReplica


@pytest.mark.parametrize("structure", [0, [], {}, (), [0, {"a": 0}]], ids=repr)
def test_pack_replaces_the_leaves(structure):
    leaves = [(k, k) for k in range(len(tf.nest.flatten(structure)))]
    packed = values.pack(structure, leaves)
    counted = iter(leaves)
    expected = tf.nest.map_structure(lambda _: next(counted), structure)
    assert packed == expected


Pair = collections.namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    "structure",
    [0, [], {}, (), {"b": 0, "a": [0, (0,)]}, Pair(0, [0]), [Pair(0, 0)]],
    ids=repr,
)
def test_packer_packs_again_and_again(structure):
    pack = values.packer(structure)
    for start in (0, 7):
        leaves = [(start, k) for k in range(len(tf.nest.flatten(structure)))]
        expected = values.pack(structure, leaves)
        assert pack(leaves) == expected
        assert type(pack(leaves)) is type(expected)
        if isinstance(expected, dict):
            assert list(pack(leaves)) == list(expected)
