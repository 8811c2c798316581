# SPDX-License-Identifier: Apache-2.0
"""The replicas' elements: each once, from any input_fn, in any mode."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import InputContext, InputError
from replicator.inputs import feed_factory, feeds, iterators
from replicator.world import World
from tests import helpers


def echo(element: Any) -> Any:
    """The step that returns its element."""
    return element


def collect(step: Callable[[], Any], limit: int = 100) -> list[list[Any]]:
    """Runs an eager step until its inputs end; returns each replica's elements."""
    elements = []
    for _ in range(limit):
        try:
            elements.append([value.numpy() for value in step()])
        except tf.errors.OutOfRangeError:
            return [list(column) for column in zip(*elements, strict=True)]
    raise AssertionError("the inputs did not end")


# --- InputContext --------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_each_replica_is_given_its_own_context(replicas):
    given = []

    def input_fn(ctx):
        given.append(ctx)
        return tf.data.Dataset.from_tensors(ctx.replica_id)

    values = helpers.make(replicas).run(echo, input_fn)
    assert [int(v) for v in values] == list(range(replicas))
    assert given == [InputContext(r, replicas, r, replicas) for r in range(replicas)]


def test_a_pipeline_for_the_worker_is_told_so():
    given = []

    def input_fn(ctx):
        given.append(ctx)
        return tf.data.Dataset.range(6)

    helpers.make(3).run(echo, input_fn, input_mode="per_worker")
    assert given == [InputContext(0, 3, 0, 1)]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
def test_a_global_batch_is_divided_evenly(replicas):
    context = InputContext(0, replicas, 0, replicas)
    assert context.per_replica_batch_size(24) * replicas == 24


@pytest.mark.parametrize(
    ("size", "replicas", "nearest"),
    [(10, 4, "8 or 12"), (3, 4, "4 or 8"), (0, 2, "2 or 4"), (7, 2, "6 or 8")],
)
def test_a_batch_that_leaves_a_remainder_is_refused(size, replicas, nearest):
    context = InputContext(0, replicas, 0, replicas)
    with pytest.raises(InputError) as caught:
        context.per_replica_batch_size(size)
    message = str(caught.value)
    assert f"{size} examples" in message
    assert f"{replicas} replicas" in message
    assert f"Fix: use a multiple of {replicas}, e.g. {nearest}." in message
    assert isinstance(caught.value, ValueError)


# --- The kinds of input_fn -----------------------------------------------------------


class _Source:
    """An object whose method and whose call are input_fns."""

    def __init__(self, size: int) -> None:
        self.size = size

    def method(self, ctx: InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.range(self.size).shard(ctx.num_pipelines, ctx.replica_id)

    def __call__(self) -> tf.data.Dataset:
        return tf.data.Dataset.range(self.size)


def _sharded(size: int, ctx: InputContext) -> tf.data.Dataset:
    return tf.data.Dataset.range(size).shard(ctx.num_pipelines, ctx.pipeline_id)


def _named(context: Any = None) -> tf.data.Dataset:
    return _sharded(8, context)


def _optional(size: int = 8) -> tf.data.Dataset:
    return tf.data.Dataset.range(size)


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize(
    "input_fn",
    [
        pytest.param(lambda ctx: _sharded(8, ctx), id="context"),
        pytest.param(functools.partial(_sharded, 8), id="partial"),
        pytest.param(_Source(8).method, id="method"),
        pytest.param(_named, id="context by its name"),
        pytest.param(lambda: tf.data.Dataset.range(8), id="no parameter"),
        pytest.param(_Source(8), id="callable object"),
        pytest.param(_optional, id="optional parameter"),
        pytest.param(lambda *_: tf.data.Dataset.range(8), id="starred"),
    ],
)
def test_replica_i_sees_elements_i_plus_multiples_of_r(mode, input_fn):
    values = helpers.run(mode, helpers.make(4), lambda: echo, input_fn, steps=2)
    assert [int(v) for v in values] == [4, 5, 6, 7]


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("takes_context", [True, False])
def test_per_worker_deals_one_pipeline(mode, takes_context):
    calls = []

    def build():
        calls.append(0)
        return tf.data.Dataset.range(8)

    repl = helpers.make(2)
    input_fn = (lambda ctx: build()) if takes_context else build
    run = functools.partial(repl.run, echo, input_fn, input_mode="per_worker")
    if mode == "session":
        with tf.Graph().as_default():
            fetches = run()
            with tf.compat.v1.train.MonitoredSession() as session:
                values = [session.run(fetches) for _ in range(2)]
    else:
        call = tf.function(run) if mode == "function" else run
        values = [call() for _ in range(2)]
    assert [[int(v) for v in step] for step in values] == [[0, 1], [2, 3]]
    assert len(calls) == 1


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_function_is_called_in_the_graph_of_the_step(mode):
    def input_fn(ctx):
        return lambda: {
            "id": tf.constant(ctx.replica_id),
            "noise": tf.random.uniform([4]),
        }

    repl = helpers.make(2)
    if mode == "session":
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            fetches = repl.run(echo, input_fn)
            one, two = session.run(fetches), session.run(fetches)
    else:
        call = repl.build(echo, input_fn)
        call = tf.function(call) if mode == "function" else call
        one, two = tf.nest.map_structure(np.asarray, [call(), call()])
    assert list(one["id"]) == [0, 1]
    draws = [*one["noise"], *two["noise"]]
    assert len({draw.tobytes() for draw in draws}) == 4


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_functions_are_called_in_replica_order(mode):
    repl = helpers.make(3)
    with repl.context():
        counter = tf.Variable(0)

    def input_fn():
        return lambda: counter.assign_add(1)

    call = repl.build(echo, input_fn)
    call = tf.function(call) if mode == "function" else call
    assert [[int(x) for x in call()] for _ in range(2)] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_functions_draw_other_numbers_for_each_replica(mode, nested):
    """Also with a seed of their own, from which replica 0's are drawn."""
    tf.compat.v1.set_random_seed(None)  # other tests set one for all of the process
    repl = helpers.make(3)
    draw = functools.partial(tf.random.uniform, [4], seed=1)

    def function() -> tf.Tensor:
        return tf.function(draw)() if nested else draw()

    values = helpers.run(mode, repl, lambda: echo, lambda: function)
    assert len({np.asarray(value).tobytes() for value in values}) == 3
    with tf.Graph().as_default(), helpers.session() as session:
        alone = session.run(helpers.make(1).run(echo, lambda: function))
    np.testing.assert_array_equal(values[0], alone[0])


def test_functions_that_cannot_draw_other_numbers_are_refused():
    draw = tf.function(lambda: tf.random.uniform([4], seed=1)).get_concrete_function()
    with pytest.raises(replicator.ReplicatorError, match="draw the same random num"):
        helpers.make(2).run(echo, lambda: lambda: draw())


@pytest.mark.parametrize("mode", helpers.MODES)
def test_tensors_are_fed_as_they_are(mode):
    def input_fn(ctx):
        return tf.fill([2], float(ctx.replica_id)), [np.int64(3), "word"]

    fed = helpers.run(mode, helpers.make(2), lambda: echo, input_fn)
    numbers, (integers, words) = fed
    np.testing.assert_array_equal(numbers, [[0.0, 0.0], [1.0, 1.0]])
    assert [int(i) for i in integers] == [3, 3]
    assert list(words) == [b"word", b"word"]


@pytest.mark.parametrize("function", [False, True], ids=["values", "functions"])
def test_nothing_waits_for_values_that_are_there(function):
    """Waiting would take each step through all devices before it starts."""
    value = tf.constant(1.0)
    feed = feed_factory.make_feed(
        lambda: (lambda: value) if function else value,
        World.single_process(helpers.make(2).devices),
        "per_replica",
    )

    @tf.function(autograph=False)
    def step():
        elements = feed.pull()
        assert len(feed.ready(elements)) == (2 if function else 0)
        assert bool(elements[1].op.control_inputs) == function
        return elements

    assert [float(element) for element in step()] == [1.0, 1.0]


def test_effects_wait_for_tensors_that_have_yet_to_be_computed():
    """Such as the tensors of a user's iterator in a tf.Graph."""
    repl = helpers.make(2)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with repl.context():
            count = tf.Variable(0, dtype=tf.int64)
        iterator = tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.range(3))

        def input_fn():
            return iterator.get_next()

        def step_fn(element):
            count.assign_add(1)
            return element

        fetches = repl.run(step_fn, input_fn)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(fetches)
        for _ in range(3):
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(fetches)
        assert [session.run(part) for part in count.components] == [1, 1]


# --- Elements ------------------------------------------------------------------------


def _elements() -> dict[str, tf.data.Dataset]:
    rows = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6]])
    sparse = tf.sparse.from_dense(tf.eye(4))
    return {
        "dictionary": tf.data.Dataset.from_tensor_slices({"x": [1, 2, 3, 4]}),
        "tuple": tf.data.Dataset.from_tensor_slices(([1, 2, 3, 4], [1.0, 2, 3, 4])),
        "nested": tf.data.Dataset.from_tensor_slices({"a": {"b": ([1, 2, 3, 4],)}}),
        "strings": tf.data.Dataset.from_tensor_slices(["a", "b", "c", "d"]),
        "ragged": tf.data.Dataset.from_tensor_slices(rows).batch(1),
        "ragged batch": tf.data.Dataset.from_tensor_slices(rows).ragged_batch(1),
        "sparse": tf.data.Dataset.from_tensor_slices(sparse),
        "scalars": tf.data.Dataset.range(4),
    }


def _plain(element: Any) -> Any:
    """Returns an element, eager or fetched, as nested lists."""

    if isinstance(element, dict):
        return {key: _plain(value) for key, value in element.items()}
    if type(element) in (tuple, list):
        return [_plain(value) for value in element]
    if isinstance(element, tf.compat.v1.SparseTensorValue):
        element = tf.SparseTensor(*element)
    if isinstance(element, tf.SparseTensor):
        element = tf.sparse.to_dense(element)
    if hasattr(element, "to_list"):
        return element.to_list()
    return np.asarray(element).tolist()


def _of_replica(structure: Any, replica_id: int) -> Any:
    """Selects one replica's values from a structure of PerReplica leaves."""
    if isinstance(structure, replicator.PerReplica):
        return structure[replica_id]
    if isinstance(structure, dict):
        return {k: _of_replica(v, replica_id) for k, v in structure.items()}
    return tuple(_of_replica(v, replica_id) for v in structure)


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", ["eager", "session"])
@pytest.mark.parametrize("dealt", [True, False], ids=["dealt", "sharded"])
@pytest.mark.parametrize("kind", list(_elements()))
def test_elements_of_every_structure_arrive_whole(kind, dealt, mode):
    def sharded(ctx):
        return _elements()[kind].shard(ctx.num_pipelines, ctx.pipeline_id)

    repl = helpers.make(2)
    input_fn = (lambda: _elements()[kind]) if dealt else sharded
    if mode == "session":
        with tf.Graph().as_default():
            fetches = repl.run(echo, input_fn)
            with tf.compat.v1.train.MonitoredSession() as session:
                steps = [session.run(fetches) for _ in range(2)]
    else:
        steps = [repl.run(echo, input_fn) for _ in range(2)]
    elements = [_plain(_of_replica(step, r)) for step in steps for r in range(2)]
    assert elements == [_plain(element) for element in _elements()[kind]]


# --- Each element once ---------------------------------------------------------------


@pytest.mark.parametrize("input_mode", ["per_replica", "per_worker"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_shuffled_dataset_is_seen_once_in_all(replicas, input_mode):
    def input_fn():
        return tf.data.Dataset.range(24).shuffle(24)

    step = helpers.make(replicas).build(echo, input_fn, input_mode)
    seen = collect(step)
    assert sorted(x for elements in seen for x in elements) == list(range(24))
    assert [len(elements) for elements in seen] == [24 // replicas] * replicas


def test_uneven_last_batches_reach_their_replicas():
    def input_fn():
        return tf.data.Dataset.range(10).batch(3)  # 3, 3, 3, 1

    seen = collect(helpers.make(2).build(echo, input_fn))
    assert [[len(batch) for batch in batches] for batches in seen] == [[3, 3], [3, 1]]
    assert np.concatenate([batch for batches in seen for batch in batches]).sum() == 45


@pytest.mark.parametrize("mode", ["eager", "session"])
def test_an_element_without_partners_is_not_trained_on(mode):
    """Of 5 elements, 2 replicas see 4; the step that would see the last one ends."""
    repl = helpers.make(2)

    def input_fn():
        return tf.data.Dataset.range(5)

    if mode == "eager":
        assert collect(repl.build(echo, input_fn)) == [[0, 2], [1, 3]]
        return
    with tf.Graph().as_default():
        fetches = repl.run(echo, input_fn)
        elements = []
        with tf.compat.v1.train.MonitoredSession() as session:
            while not session.should_stop():
                elements.append(session.run(fetches))
    assert [tuple(step) for step in elements] == [(0, 1), (2, 3)]


# --- Between calls -------------------------------------------------------------------


def test_the_iterator_lives_between_calls():
    repl = helpers.make(2)

    def input_fn():
        return tf.data.Dataset.range(100)

    first = [repl.run(echo, input_fn) for _ in range(3)]
    assert [[int(x) for x in step] for step in first] == [[0, 1], [2, 3], [4, 5]]
    in_function = tf.function(lambda: repl.run(echo, input_fn))
    assert [int(x) for x in in_function()] == [6, 7]
    assert [int(x) for x in repl.run(echo, input_fn)] == [8, 9]


def test_two_steps_have_inputs_of_their_own():
    repl = helpers.make(2)

    def input_fn():
        return tf.data.Dataset.range(100)

    def negative(x):
        return -x

    for k in range(3):
        assert [int(x) for x in repl.run(echo, input_fn)] == [2 * k, 2 * k + 1]
        assert [int(x) for x in repl.run(negative, input_fn)] == [-2 * k, -2 * k - 1]


@pytest.mark.parametrize("dealt", [True, False], ids=["dealt", "sharded"])
def test_initialize_starts_over_when_eager(dealt):
    repl = helpers.make(2)

    def sharded(ctx):
        return tf.data.Dataset.range(6).shard(ctx.num_pipelines, ctx.pipeline_id)

    step = repl.build(echo, (lambda: tf.data.Dataset.range(6)) if dealt else sharded)
    step.initialize()  # nothing has begun: no effect
    assert collect(step) == [[0, 2, 4], [1, 3, 5]]
    repl.initialize()
    assert collect(step) == [[0, 2, 4], [1, 3, 5]]
    step.initialize()
    assert [int(x) for x in step()] == [0, 1]
    step.initialize()  # within an epoch, with prefetched elements
    assert [int(x) for x in step()] == [0, 1]


def test_initialize_starts_over_in_a_session():
    repl = helpers.make(2)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fetches = repl.run(echo, lambda: tf.data.Dataset.range(4))
        with pytest.raises(tf.errors.FailedPreconditionError):
            session.run(fetches)
        for _ in range(2):
            repl.initialize(session)
            assert [tuple(session.run(fetches)) for _ in range(2)] == [(0, 1), (2, 3)]
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(fetches)


@pytest.mark.parametrize("input_fn", [lambda: tf.constant(1), lambda: lambda: 1])
def test_initialize_has_nothing_to_do_without_a_dataset(input_fn):
    repl = helpers.make(2)
    before = [int(x) for x in repl.run(echo, input_fn)]
    repl.initialize()
    assert [int(x) for x in repl.run(echo, input_fn)] == before == [1, 1]


def test_each_graph_has_inputs_of_its_own():
    repl = helpers.make(2)

    def input_fn():
        return tf.data.Dataset.range(100)

    for _ in range(2):
        with tf.Graph().as_default():
            fetches = repl.run(echo, input_fn)
            with tf.compat.v1.train.MonitoredSession() as session:
                assert tuple(session.run(fetches)) == (0, 1)


# --- Prefetching ---------------------------------------------------------------------


@pytest.mark.parametrize("dealt", [True, False], ids=["dealt", "sharded"])
def test_the_next_elements_are_made_while_the_step_runs(dealt):
    made = []

    def note(x):
        made.append(int(x))
        return x

    def input_fn(ctx=None):
        dataset = tf.data.Dataset.range(100)
        if ctx is not None:
            dataset = dataset.shard(ctx.num_pipelines, ctx.pipeline_id)
        return dataset.map(lambda x: tf.py_function(note, [x], x.dtype))

    repl = helpers.make(2)
    repl.run(echo, (lambda: input_fn()) if dealt else input_fn)
    deadline = time.monotonic() + 10
    while len(made) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    # The step took two elements; only prefetching requested the others, and it stops at
    # two steps (plus the pipeline's current element).
    assert 6 <= len(set(made)) == len(made) <= 8


@pytest.mark.parametrize("chosen", [None, True, False])
def test_the_autotuner_is_off_unless_it_was_chosen(chosen, monkeypatch):
    """Its threads can block the process when an iterator is freed or restarted."""
    given = []
    monkeypatch.setattr(
        iterators, "make", lambda dataset: given.append(dataset) or iter(dataset)
    )

    def input_fn():
        dataset = tf.data.Dataset.range(4)
        if chosen is None:
            return dataset
        options = tf.data.Options()
        options.autotune.enabled = chosen
        options.deterministic = False
        return dataset.with_options(options)

    helpers.make(2).run(echo, input_fn)
    assert given[0].options().autotune.enabled is bool(chosen)
    assert given[0].options().deterministic is (None if chosen is None else False)


def test_asynchronous_programs_share_a_dataset_out():
    def elements(number):
        feed = feed_factory.make_feed(
            tf.data.Dataset.range(6),
            helpers.make(1)._settings.world,
            "per_replica",
            program=feed_factory.AsynchronousProgram(number, 2),
        )
        return [int(feed.pull()[0]) for _ in range(3)]

    assert [elements(number) for number in (0, 1)] == [[0, 2, 4], [1, 3, 5]]


def test_a_process_feeds_its_own_replicas():
    class Whole(feeds.Feed):
        def pull(self):
            return ["a", "b", "c", "d"]

        def initialize(self, session):
            pass

    assert feeds.PartFeed(Whole(), [1, 3]).pull() == ["b", "d"]
