# SPDX-License-Identifier: Apache-2.0
"""Values passed to a step's call are fed as they are at that moment."""

from __future__ import annotations

import collections
import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import ArgumentError, InputError, PerReplica
from tests import helpers

Pair = collections.namedtuple("Pair", "one two")


@dataclasses.dataclass
class State:
    """A structure for tf.nest, with a fact that is no tensor."""

    one: Any
    two: Any
    name: Any = "state"

    def __tf_flatten__(self) -> tuple[Any, tuple[Any, ...]]:
        return (self.name,), (self.one, self.two)

    @classmethod
    def __tf_unflatten__(cls, facts: Any, parts: Any) -> State:
        return cls(*parts, *facts)


def _run(mode: str, repl: Any, step_fn: Any, *inputs: Any, **options: Any) -> Any:
    """Runs a step on values that each mode's functions make."""
    with tf.Graph().as_default() if mode == "session" else tf.init_scope():
        values = {name: option() for name, option in options.items()}
        if mode == "function":
            arrays = [value() for value in inputs]
            call = tf.function(lambda: repl.run(step_fn, *arrays, **values))
            return tf.nest.map_structure(np.asarray, call())
        returned = repl.run(step_fn, *(value() for value in inputs), **values)
        if mode == "session":
            with tf.compat.v1.train.MonitoredSession() as session:
                return session.run(returned)
        return tf.nest.map_structure(np.asarray, returned)


KINDS = {
    "float": lambda: 2.0,
    "int": lambda: 3,
    "bool": lambda: True,
    "text": lambda: "ab",
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "big endian": lambda: np.arange(3, dtype=">i4"),
    "NumPy scalar": lambda: np.float64(1.5),
    "tensor": lambda: tf.constant([1, 2]),
    "nest": lambda: {"a": [1.0, (np.ones(2), 3)], "b": Pair(1, tf.zeros([0, 2]))},
    "ordered": lambda: collections.OrderedDict(z=1.0, a=2.0),
    "default": lambda: collections.defaultdict(list, a=2.0),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", helpers.MODES)
def test_args_are_handed_to_every_replica(mode: str, kind: str) -> None:
    repl, seen = helpers.make(2), []

    def step_fn(x: Any) -> Any:
        seen.append(type(x))
        leaves = tf.nest.flatten(x)
        assert all(leaf.device == repl.devices[repl.replica_id] for leaf in leaves)
        return x

    value = KINDS[kind]()
    actual = _run(mode, repl, step_fn, args=lambda: (KINDS[kind](),))
    expected = tf.nest.map_structure(lambda x: np.asarray(tf.constant(x)), value)
    for r in range(2):
        own = [leaf for k, leaf in enumerate(tf.nest.flatten(actual)) if k % 2 == r]
        for one, other in zip(own, tf.nest.flatten(expected), strict=True):
            np.testing.assert_array_equal(one, other)
            assert mode == "session" or one.dtype == other.dtype
    if isinstance(value, tuple | list | dict):
        assert seen == [type(value)] * 2


@pytest.mark.parametrize("mode", helpers.MODES)
def test_of_a_per_replica_each_replica_gets_its_own(mode: str) -> None:
    repl = helpers.make(3)

    def args() -> Any:
        return {"x": PerReplica(1.0, 2.0, 3.0), "y": 10.0}, None

    actual = _run(mode, repl, lambda d, none: (d["x"] * d["y"], none), args=args)
    assert [float(x) for x in actual[0]] == [10.0, 20.0, 30.0]


def test_what_a_step_returned_goes_into_the_next() -> None:
    repl = helpers.make(2)
    state = PerReplica(np.float32(0.0), np.float32(1.0))
    for _ in range(3):
        state = repl.run(lambda x: x + repl.all_reduce(x), args=(state,))
    assert [float(x) for x in state] == [13.0, 14.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_composite_tensors_arrive_whole(mode: str) -> None:
    repl = helpers.make(2)

    def args() -> Any:
        with repl.context():  # its assertions are conditionals, of TensorFlow 2 here
            ragged = tf.RaggedTensor.from_row_splits([1, 2, 3], [0, 1, 3])
        return ragged, tf.sparse.from_dense([[0, 5], [6, 0]])

    def step_fn(ragged: Any, sparse: Any) -> Any:
        assert isinstance(ragged, tf.RaggedTensor)
        return ragged.to_tensor(), tf.sparse.to_dense(sparse)

    dense, sparse = _run(mode, repl, step_fn, args=args)
    assert dense[1].tolist() == [[1, 0], [2, 3]]
    assert sparse[0].tolist() == [[0, 5], [6, 0]]


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_arrays_are_the_element_of_each_replica(mode: str, replicas: int) -> None:
    """As if an input_fn had returned them."""
    repl = helpers.make(replicas)
    x, y = np.arange(4.0), np.arange(4)

    def step_fn(batch: Any) -> Any:
        images, labels = batch
        return images, labels

    actual = _run(mode, repl, step_fn, lambda: (x, y))
    again = _run(mode, repl, step_fn, lambda: lambda: (x, y))
    for results in (actual, again):
        assert [v.tolist() for v in results[0]] == [x.tolist()] * replicas
        assert [v.tolist() for v in results[1]] == [y.tolist()] * replicas


# --- Freshness ------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["args", "inputs"])
@pytest.mark.parametrize("make", [float, int, np.float32, tf.constant, np.ones])
def test_other_values_are_fed_without_another_build(make: Any, by: str) -> None:
    repl, builds = helpers.make(2), []

    def step_fn(pair: Any) -> Any:
        builds.append(repl.replica_id)
        return pair[0] + tf.cast(repl.replica_id, pair[0].dtype)

    for k in range(1, 6):
        value = (np.full([3], k),) if make is np.ones else (make(k),)
        run = {"args": (value,)} if by == "args" else {"input_fn": value}
        for r, own in enumerate(repl.run(step_fn, **run)):
            np.testing.assert_array_equal(own, np.asarray(value[0]) + r)
    assert builds == [0, 1]


def test_an_array_that_is_changed_in_place_is_read_at_each_call() -> None:
    repl, data = helpers.make(2), np.zeros(40)
    for k in range(3):
        data[:] = k
        assert repl.run(lambda x: x, args=(data,))[1].numpy().tolist() == [k] * 40


def test_values_of_one_kind_are_built_once_and_shared_with_none() -> None:
    """Structures, dtypes and shapes that differ make separate steps."""
    repl, builds = helpers.make(1), []

    def step_fn(*values: Any) -> Any:
        builds.append(values)
        return values

    kinds: list[Any] = [(1,), (1.0,), (True,), ([1],), ((1,),), ({"a": 1},)]
    kinds += [({"b": 1},), (1, 2), (None, 1), (1, None), (Pair(1, 2),), ((1, 2),)]
    kinds += [(np.zeros(2),), (np.zeros(3),), (np.zeros([2, 1]),), ([[1]],)]
    for _ in range(2):
        for args in kinds:
            (actual,) = [
                tf.nest.map_structure(lambda x: x, repl.run(step_fn, args=args))
            ]
            flat = [np.asarray(v[0]) for v in _leaves(actual)]
            expected = [np.asarray(v) for v in tf.nest.flatten(args) if v is not None]
            assert all(map(np.array_equal, flat, expected)), args
    assert len(builds) == len(kinds)


def _leaves(nest: Any) -> list[Any]:
    if isinstance(nest, PerReplica):
        return [] if nest[0] is None else [nest]
    entries = nest.values() if isinstance(nest, dict) else nest
    return [leaf for entry in entries for leaf in _leaves(entry)]


@pytest.mark.parametrize("by", ["args", "inputs", "build"])
def test_no_array_is_kept(by: str) -> None:
    repl = helpers.make(2)

    class Array(np.ndarray):
        """Can be watched."""

    def use() -> weakref.ref[Any]:
        data = np.zeros([1000]).view(Array)
        if by == "args":
            repl.run(lambda x: x, args=(data,))
        elif by == "inputs":
            repl.run(step_fn, data)
        else:
            assert repl.build(step_fn, args=(data,)).plan is not None
        return weakref.ref(data)

    def step_fn(x: Any) -> Any:
        return tf.reduce_sum(x)

    held = use()
    gc.collect()
    assert held() is None


def test_inputs_go_on_while_args_change_their_kind() -> None:
    repl = helpers.make(2)
    data = tf.data.Dataset.range(100)
    seen: list[Any] = []
    for args in ((1,), (np.ones([2], np.int64),), (3,), (np.ones([3], np.int64),)):
        values = repl.run(
            lambda x, y: x * 0 + tf.cast(y, tf.int64) * 0 + x, data, args=args
        )
        seen += [int(np.max(v)) for v in values]
    # The lambdas share one code object, but each turn makes a new function: that
    # restarts.
    assert seen == [0, 1] * 4

    def step_fn(x: Any, y: Any) -> Any:
        return x + 0 * tf.cast(tf.reduce_sum(y), tf.int64)

    seen = []
    for args in ((1,), (np.ones([2]),), (3,), (np.ones([3]),)):
        seen += [int(v) for v in repl.run(step_fn, data, args=args)]
    assert seen == list(range(8))


def test_variables_of_a_step_stay_when_its_args_change_their_kind() -> None:
    repl = helpers.make(2)

    def step_fn(x: Any) -> Any:
        return tf.Variable(0.0).assign_add(tf.reduce_sum(tf.cast(x, tf.float32)))

    actual = [float(repl.run(step_fn, args=(x,))) for x in (1.0, 2, np.ones(3))]
    assert actual == [1.0, 3.0, 6.0]


def test_many_kinds_of_values_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    repl = helpers.make(2)

    def step_fn(x: Any) -> Any:
        return tf.reduce_sum(x)

    for size in range(8):
        repl.run(step_fn, args=(np.ones(size),))
    (message,) = [r.getMessage() for r in caplog.records if "shapes" in r.getMessage()]
    assert (
        "test_call_values.py:" in message
        and "in step_fn" in message
        and "5 structures" in message
    )


def test_arrays_that_all_replicas_get_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    repl = helpers.make(2)

    def step_fn(x: Any) -> Any:
        return x

    data = np.zeros(4)
    repl.run(step_fn, args=(data,))
    repl.run(step_fn, data, input_mode="global_batch")
    repl.run(lambda x: x, (PerReplica(data, data),))
    helpers.make(1).run(step_fn, data)
    assert not caplog.records
    for _ in range(3):
        repl.run(step_fn, data)
        repl.run(lambda x: x, data)
    (message,) = [r.getMessage() for r in caplog.records]
    assert "each of the 2 replicas is given all of them" in message
    assert "test_call_values.py:" in message and 'input_mode="global_batch"' in message


# --- Built steps ----------------------------------------------------------------------


def test_a_built_step_is_called_with_args() -> None:
    repl, builds = helpers.make(2, build="trace"), []

    def step_fn(x: Any, y: Any) -> Any:
        builds.append(1)
        return x * tf.cast(y, tf.int64)

    data = tf.data.Dataset.range(1, 100)
    step = repl.build(step_fn, data, args=(10,))
    assert [int(v) for v in step()] == [10, 20]
    assert [int(v) for v in step(100)] == [300, 400]
    assert [int(v) for v in step()] == [50, 60]
    assert [int(v) for v in repl.run(step_fn, data, args=(1,))] == [7, 8]
    assert len(builds) == 2
    assert repl.build(step_fn, data) is repl.build(step_fn, data)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_several_steps_per_call_are_handed_the_same_args(mode: str) -> None:
    repl = helpers.make(2)
    actual = _run(
        mode,
        repl,
        lambda x, y: x * y,
        lambda: lambda: tf.data.Dataset.range(1, 9),
        args=lambda: (tf.constant(10, tf.int64),),
        steps_per_call=lambda: 2,
    )
    assert [v.tolist() for v in actual] == [[10, 30], [20, 40]]
    for k in (1, 2):  # not as it was when the step was built
        results = repl.run(lambda y: y + 1, args=(np.int64(k),), steps_per_call=3)
        assert results[0].numpy().tolist() == [k + 1] * 3


def test_copies_are_handed_their_own() -> None:
    repl = helpers.make(4, build="clone")

    def step_fn(x: Any, y: Any, z: Any) -> Any:
        return x + y * z

    data = tf.data.Dataset.from_tensor_slices(tf.range(8.0))
    for k in (1.0, 2.0):
        args = (PerReplica(10.0, 20.0, 30.0, 40.0), k)
        actual = repl.run(step_fn, data, args=args)
        first = 4 * (k - 1)
        assert [float(v) for v in actual] == [
            first + r + 10 * (r + 1) * k for r in range(4)
        ]


def test_a_placeholder_is_fed_in_a_session() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [])
        total = repl.run(lambda x: repl.all_reduce(x), args=(x,))
        with tf.compat.v1.Session() as session:
            for k in (1.0, 2.0):
                assert session.run(total, {x: k}) == (2 * k, 2 * k)


def test_a_list_that_a_module_tracks_is_a_list() -> None:
    module = tf.Module()
    module.values = [tf.constant(1.0), tf.constant(2.0)]

    def step(values: list[tf.Tensor]) -> tf.Tensor:
        values[0] = tf.constant(10.0)
        return tf.add_n(values + [tf.constant(100.0)])

    repl = helpers.make(2)
    assert [float(y) for y in repl.run(step, args=(module.values,))] == [112.0] * 2


def test_a_tensor_of_a_function_is_fed() -> None:
    repl = helpers.make(2)
    call = tf.function(lambda x: repl.run(lambda x: repl.all_reduce(x), args=(x,)))
    for k in (1.0, 2.0):
        assert [float(v) for v in call(tf.constant(k))] == [2 * k, 2 * k]
    assert call.experimental_get_tracing_count() == 1


# --- Errors ---------------------------------------------------------------------------


def _other_graphs() -> Any:
    with tf.Graph().as_default():
        return tf.constant(1.0)


WRONG = {
    "no tuple": (lambda: 3.0, r"args=3\.0.*args=\(x,\)"),
    "a tensor": (lambda: tf.zeros([2]), r"was given args=<tf\.Tensor.*args=\(x,\)"),
    "a PerReplica": (lambda: PerReplica(1, 2), r"was given args=PerReplica\(1, 2\)"),
    "another number": (
        lambda: (PerReplica(1, 2, 3),),
        "args holds a PerReplica of 3 values.*each of the 2 replicas",
    ),
    "an object": (lambda: (object(),), "args holds object .*functools.partial"),
    "a model": (
        lambda: (tf.keras.layers.Dense(1),),
        "args holds Dense .*it is a function.*code around it",
    ),
    "a variable": (
        lambda: (tf.Variable(1.0, name="mine"),),
        r"args holds the variable 'mine:0'.*tf.identity\(variable\)",
    ),
    "a Keras variable": (
        lambda: (tf.keras.Variable(1.0, name="own"),),
        r"args holds the variable 'own'.*tf.identity\(variable\)",
    ),
    "a dataset": (lambda: (tf.data.Dataset.range(3),), "args holds .*it is a Dataset"),
    "an iterator": (lambda: (iter([1]),), "args holds list_iterator.*an iterator"),
    "ragged lists": (lambda: (np.array([None]),), "args holds ndarray .*not a tensor"),
    "another graph's": (lambda: (_other_graphs(),), "tensor of another graph"),
}


@pytest.mark.parametrize(("make", "said"), WRONG.values(), ids=WRONG)
def test_what_is_no_value_is_refused(make: Any, said: str) -> None:
    repl = helpers.make(2)
    for call in (repl.run, repl.build(lambda x: x, args=(1,))):
        args = make()
        wrong = isinstance(args, tuple) and type(args) is tuple
        if call is not repl.run and not wrong:
            continue
        with pytest.raises(ArgumentError, match=rf"(?s){said}.*") as caught:
            call(lambda x: x, args=args) if call == repl.run else call(*args)
        assert "test_call_values.py:" in str(caught.value) and "Fix: " in str(
            caught.value
        )


def test_an_unlike_per_replica_is_refused() -> None:
    repl = helpers.make(2)
    with pytest.raises(InputError, match="feeds the replicas differently"):
        repl.run(lambda x: 0, (PerReplica(1, 2.0),))
    with pytest.raises(replicator.MismatchError):
        repl.run(lambda x: repl.all_reduce(x), args=(PerReplica(1, 2.0),))


def test_a_step_that_cannot_take_its_args_says_so() -> None:
    with pytest.raises(ArgumentError, match=r"called with 1 argument(?s:.*)args"):
        helpers.make(2).run(lambda: 1, args=(1,))


def test_what_a_step_returned_goes_back_as_the_dataclass_that_it_was() -> None:
    repl = helpers.make(2)
    names = []

    def step(state: State, x: Any) -> State:
        names.append(state.name)
        value = x + repl.replica_id
        return State(state.one + value, state.two * 2.0, state.name)

    for name in ("a", "b"):  # facts are part of a step's signature
        state = State(tf.zeros([2]), np.float32(1.0), name)
        for _ in range(3):
            state = repl.run(step, args=(state, tf.constant([1.0, 2.0])))
        assert [x.numpy().tolist() for x in state.one] == [[3.0, 6.0], [6.0, 9.0]]
        assert [float(x) for x in state.two] == [8.0, 8.0]
        assert state.name == name
    assert set(names) == {"a", "b"}
    parts = State(tf.range(4), tf.range(4))
    shards = repl.run(lambda s: s.one + s.two, parts, input_mode="global_batch")
    assert [x.numpy().tolist() for x in shards] == [[0, 2], [4, 6]]


def test_objects_of_attrs_are_taken_apart() -> None:
    attr = pytest.importorskip("attr")
    made = attr.make_class("Made", ["one", "two"])
    repl = helpers.make(2)
    got = repl.run(lambda s: made(s.two, s.one), args=(made(1, {"x": 2.0}),))
    assert [float(x) for x in got.one["x"]] == [2.0, 2.0]
    assert [int(x) for x in got.two] == [1, 1]


def test_a_dataclass_whose_facts_have_no_hash_is_refused() -> None:
    repl = helpers.make(2)
    with pytest.raises(ArgumentError) as caught:
        repl.run(lambda s: s.one, args=(State(1.0, 2.0, ["list"]),))
    message = str(caught.value)
    for part in (
        "State whose metadata cannot be hashed",
        "Fix: ",
        "test_call_values.py",
    ):
        assert part in message
