# SPDX-License-Identifier: Apache-2.0
"""PerReplica is a tuple that survives everything that rebuilds tuples."""

from __future__ import annotations

import collections
import copy
import operator
import pickle
import re

import numpy as np
import pytest
import tensorflow as tf

from replicator import MismatchError, PerReplica, errors, values
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
    assert all(type(value) is type(alone) for value in fetched)


@pytest.mark.parametrize("count", [1, 2])
def test_a_function_returns_its_values(count):
    returned = tf.function(lambda: {"x": PerReplica([tf.constant(3)] * count)})()["x"]
    assert type(returned) is PerReplica
    assert [int(t) for t in returned] == [3] * count


def test_a_function_takes_its_values_for_those_of_the_replicas():
    step = helpers.make(2).build(tf.reduce_sum, args=(PerReplica(0.0, 0.0),))
    run = tf.function(lambda x: step(x))
    for pair in ([1.0, 10.0], [2.0, 20.0]):
        given = [tf.constant(value) for value in pair]
        assert [float(y) for y in run(PerReplica(given))] == pair
        # All of a plain tuple goes to each replica.
        assert [float(y) for y in run(tuple(given))] == [sum(pair)] * 2
    assert run.experimental_get_tracing_count() == 2


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


# --- As one value ---------------------------------------------------------------------

_MADE = {
    "eager": tf.constant,
    "numpy": np.float32,
    "array": lambda x: np.asarray(x, np.float32),
    "python": float,
    "variable": tf.Variable,
}


@pytest.mark.parametrize("make", _MADE)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_equal_values_are_used_as_one(make, count):
    loss = PerReplica([_MADE[make](0.125) for _ in range(count)])
    assert float(loss) == loss.item() == 0.125
    assert int(PerReplica([_MADE[make](3.0)] * count)) == 3
    assert complex(loss) == 0.125 + 0j
    assert f"{loss:.2f}|{loss:8.4f}|{loss:e}" == "0.12|  0.1250|1.250000e-01"
    assert f"{loss}" == str(loss) and "PerReplica(" in f"{loss}"
    assert round(loss, 1) == 0.1 and round(loss) == 0
    assert (
        np.asarray(loss.numpy()).tobytes() == np.asarray(_MADE[make](0.125)).tobytes()
    )


def test_arrays_and_strings_are_used_as_one():
    arrays = PerReplica(tf.constant([[1.0, np.nan]]), tf.constant([[1.0, np.nan]]))
    np.testing.assert_array_equal(arrays.numpy(), [[1.0, np.nan]])
    assert PerReplica(tf.constant("a"), tf.constant("a")).numpy() == b"a"
    words = PerReplica(tf.constant(["a", "b"]), tf.constant(["a", "b"]))
    assert list(words.numpy()) == [b"a", b"b"]
    assert PerReplica(tf.constant([2.0]), tf.constant([2.0])).item() == 2.0
    rows = PerReplica(tf.ragged.constant([[1], [2, 3]]), tf.ragged.constant([[1], [2]]))
    with pytest.raises(MismatchError):
        rows.numpy()


@pytest.mark.parametrize(
    ("one", "two"),
    [(1.0, 1.0000001), (0.0, -0.0), (1.0, 1), (1.0, float("nan")), ("a", "b")],
)
@pytest.mark.parametrize("use", [float, "{:.3f}".format, PerReplica.numpy, round])
def test_values_that_differ_are_no_one_value(use, one, two):
    # Of equal scalars, TensorFlow reuses the 0.0 for -0.0.
    one, two = (tf.reshape(tf.constant([value]), []) for value in (one, two))
    loss = PerReplica(one, one, two)
    with pytest.raises(MismatchError) as caught:
        use(loss)
    message = str(caught.value)
    assert "whose replicas hold different values" in message
    assert "replica 0: " in message and "replica 2: " in message
    assert "test_values.py:" in message
    assert "Fix: use one of them, loss[0]; or all, tf.reduce_mean(loss)" in message


_OPERATORS = (
    "add sub mul truediv floordiv mod pow lt le gt ge eq ne iadd isub imul itruediv"
).split()
_INTEGER_OPERATORS = "lshift rshift and_ or_ xor".split()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("other", [2, 0.75, np.float32(2.0), np.array([1.0, 4.0])])
@pytest.mark.parametrize("make", _MADE)
def test_operators_compute_with_the_one_value(make, other, count):
    """As Python and NumPy do with the number."""
    loss = PerReplica([_MADE[make](0.5) for _ in range(count)])
    for name in _OPERATORS:
        operate = getattr(operator, name)
        np.testing.assert_array_equal(operate(loss, other), operate(0.5, other), name)
        if name[0] != "i":
            expected = operate(other, 0.5)
            np.testing.assert_array_equal(operate(other, loss), expected, name)
    assert (-loss, +loss, abs(-loss), divmod(loss, 2)) == (-0.5, 0.5, 0.5, (0.0, 0.5))


@pytest.mark.parametrize("name", ["matmul", "lshift", "invert"])
def test_what_a_number_cannot_do_is_an_error_as_of_the_number(name):
    """Python's own, which names the operator and both types."""
    operate, others = getattr(operator, name), (2,) * (name != "invert")
    with pytest.raises(TypeError) as of_number:
        operate(0.5, *others)
    loss = PerReplica(tf.constant(0.5), tf.constant(0.5))
    with pytest.raises(TypeError, match=re.escape(str(of_number.value))):
        operate(loss, *others)


@pytest.mark.parametrize("name", _INTEGER_OPERATORS)
def test_so_do_those_of_integers_and_conditions(name):
    operate = getattr(operator, name)
    six = PerReplica(tf.constant(6), tf.constant(6))
    assert operate(six, 3) == operate(6, 3) and operate(3, six) == operate(3, 6)
    yes = PerReplica(tf.constant(True), tf.constant(True))
    assert ~six == -7 and not ~yes
    if not name.endswith("shift"):
        assert operate(yes, False) == operate(True, False)


def test_losses_of_steps_are_summed_and_compared():
    losses = [PerReplica(tf.constant(x), tf.constant(x)) for x in (1.0, 3.0, 2.0)]
    total = 0.0
    for loss in losses:
        total += loss
    assert total == sum(losses) == 6.0 and isinstance(total, float)
    assert max(losses) is losses[1] and min(losses) is losses[0]
    assert sorted(losses)[1] is losses[2] and losses[0] < 2 < losses[1]
    assert losses[0] - losses[1] == -2.0


@pytest.mark.parametrize("other", [2.0, PerReplica(1.0, 1.0), np.ones(2)], ids=repr)
def test_operators_on_values_that_differ_are_refused(other):
    """Whatever the operator, and on whichever side the other value is."""
    differing = PerReplica(tf.constant(1.0), tf.constant(2.0))
    for name in _OPERATORS:
        if name in ("eq", "ne") and isinstance(other, PerReplica):
            continue  # those of tuples
        for pair in ((differing, other), (other, differing))[: 1 + (name[0] != "i")]:
            with pytest.raises(
                MismatchError, match="replicas hold different"
            ) as caught:
                getattr(operator, name)(*pair)
            assert "test_values.py:" in str(caught.value)


@pytest.mark.parametrize("other", [(1.0,), [1.0], tf.constant(1.0)], ids=repr)
def test_operators_with_tuples_and_tensors_are_refused(other):
    """A tuple would be joined or repeated, a tensor combined with all values."""
    loss = PerReplica(tf.constant(1.0), tf.constant(1.0))
    names = [n for n in _OPERATORS if n not in ("eq", "ne") or tf.is_tensor(other)]
    for name in names:
        with pytest.raises(errors.PerReplicaError) as caught:
            getattr(operator, name)(loss, other)
        message = str(caught.value)
        assert "of a PerReplica, which is a tuple of 2 values" in message
        assert "test_values.py:" in message
        assert "Fix: use one of them, loss[0]" in message
        assert "tf.reduce_mean(loss)" in message and "repl.all_reduce(loss" in message


def test_operators_on_symbolic_values_are_refused():
    @tf.function
    def add():
        return PerReplica(tf.constant(1.0), tf.constant(1.0)) + 1

    with pytest.raises(errors.PerReplicaError, match="symbolic tensors"):
        add()


def test_what_reads_all_values_works():
    loss = PerReplica(tf.constant(1.0), tf.constant(4.0))
    assert np.mean(loss) == float(tf.reduce_mean(loss)) == sum(loss) / 2 == 2.5
    assert float(tf.add_n(loss)) == float(np.sum(loss)) == float(max(loss) + 1.0) == 5.0
    np.testing.assert_array_equal(np.sqrt(loss), [1.0, 2.0])
    np.testing.assert_array_equal(np.maximum(loss, 2.0), [2.0, 4.0])
    assert np.isfinite(loss).all() and np.allclose(loss, [1.0, 4.0])
    assert (
        np.stack(loss).shape == tf.stack(loss).shape == np.asarray(loss).shape == (2,)
    )
    assert PerReplica(1, 2) == PerReplica(1, 2) == (1, 2) != PerReplica(1, 3)
    assert PerReplica(1.0, 2.0) == pytest.approx((1.0, 2.0))
    assert PerReplica(1) != None and len({PerReplica(1, 2), (1, 2)}) == 1  # noqa: E711
    assert [*loss, 1.0][2] == 1.0 and (*loss, *loss)[3] is loss[1]


def test_a_condition_holds_where_all_replicas_say_so():
    """`while not repl.run(is_done)` would never start with a tuple's truth value."""
    yes, no = tf.constant(True), tf.constant(False)
    assert PerReplica(yes, yes) and not PerReplica(no, no)
    assert not PerReplica(np.False_, np.False_) and not PerReplica(False)
    with pytest.raises(MismatchError, match="bool of a PerReplica"):
        bool(PerReplica(yes, no))
    assert PerReplica(tf.constant(0.0), tf.constant(1.0))  # as tf.add_n does
    assert PerReplica([tf.constant([False])] * 2) and not PerReplica()


@pytest.mark.parametrize(
    ("values_", "said"),
    [
        ([tf.zeros([2])] * 2, r"of a PerReplica of arrays of shape \[2\]"),
        ([tf.sparse.eye(2)] * 2, "of a PerReplica of SparseTensor"),
        ([None, None], "of a PerReplica of NoneType"),
        ([], "of a PerReplica"),
    ],
)
def test_what_is_no_scalar_is_no_float(values_, said):
    with pytest.raises(errors.PerReplicaError, match=said) as caught:
        float(PerReplica(values_))
    assert "test_values.py:" in str(caught.value)


def test_a_value_that_is_not_there_yet_is_refused():
    with tf.Graph().as_default():
        loss = PerReplica(tf.constant(1.0), tf.constant(1.0))
        assert loss  # a symbolic tensor has no truth
        with pytest.raises(errors.PerReplicaError, match="no value yet") as caught:
            float(loss)
        assert "Fix: in a graph, run it first (session.run" in str(caught.value)
        with tf.compat.v1.Session() as session:
            assert f"{session.run(loss):.1f}" == "1.0"


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


def test_what_one_replica_returned_is_selected_from_a_nest():
    Pair = collections.namedtuple("Pair", "one two")
    x, y = PerReplica(1, 2), PerReplica(3, 4)
    nest = {"a": [x, 7], "b": Pair(y, (x,)), "c": None}
    expected = {"a": [2, 7], "b": Pair(4, (2,)), "c": None}
    selected = helpers.make(2).select(nest, 1)
    assert selected == expected and type(selected["b"]) is Pair
    for wrong in (2, -1, 1.0, None, True):
        with pytest.raises(
            errors.ArgumentError, match="(?s)select was given.*replica <"
        ):
            values.select(x, wrong)


def test_its_repr_is_one_short_line():
    assert repr(PerReplica(tf.constant(0.1), np.float32(2))) == "PerReplica(0.1, 2.0)"
    rows = PerReplica(tf.constant([[1, 2], [3, 4]]), tf.constant("a"))
    assert repr(rows) == "PerReplica([[1, 2], [3, 4]], b'a')"
    many = repr(PerReplica(tf.zeros([1000]), tf.zeros([1000])))
    assert len(many) < 80 and "..." in many
    with tf.Graph().as_default():
        assert "tf.Tensor" in repr(PerReplica(tf.constant(1.0)))
