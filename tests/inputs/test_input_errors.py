# SPDX-License-Identifier: Apache-2.0
"""Invalid inputs, and errors that say what to pass instead."""

from __future__ import annotations

import contextlib

import pytest
import tensorflow as tf

import replicator
from replicator import InputError
from tests import helpers


def _dataset(size: int = 8) -> tf.data.Dataset:
    return tf.data.Dataset.range(size)


def _iterator(ctx):
    if tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function:
        return iter(_dataset())
    return _generator(ctx)


def _generator(ctx):
    yield tf.constant(1)


def _nothing(ctx):
    return None


WRONG = {
    "nothing": (_nothing, r"input_fn _nothing returned nothing\."),
    "an iterator": (_iterator, "input_fn _iterator returned an iterator, which cannot"),
    "a generator": (_generator, r"returned an iterator(.|\n)*Dataset.from_generator"),
    "a builtin": (dict, r"input_fn dict returned \{\}, which holds no tensor"),
    "empty": (lambda ctx: {}, r"returned \{\}, which holds no tensor"),
    "None inside": (lambda ctx: (1, None), r"returned \(1, None\), which holds no"),
    "an object": (lambda ctx: object(), "returned object, which is not a tensor"),
    "datasets in a tuple": (
        lambda ctx: (_dataset(), _dataset()),
        r"a structure that holds a Dataset(?s:.*)tf\.data\.Dataset\.zip",
    ),
    "a function of arguments": (
        lambda ctx: lambda x: x,
        "returned a function that requires arguments",
    ),
    "a function of nothing": (
        lambda ctx: lambda: None,
        "the function <lambda> returned nothing",
    ),
    "a function of objects": (
        lambda ctx: lambda: object(),
        "the function <lambda> returned object, which is not a tensor",
    ),
    "a function of datasets": (
        lambda ctx: _dataset,
        "the function _dataset returned a structure that holds a Dataset",
    ),
}


@pytest.mark.parametrize("mode", ["eager", "session"])
@pytest.mark.parametrize(("input_fn", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_feed_a_step_is_refused(input_fn, said, mode):
    graph = tf.Graph().as_default() if mode == "session" else contextlib.nullcontext()
    with graph, pytest.raises(InputError, match=said) as caught:
        helpers.make(2).run(lambda x: x, input_fn)
    assert "\nFix: return a tf.data.Dataset" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def _of_each(ctx):
    return {"x": [replicator.PerReplica(tf.ones([2]), tf.zeros([2]))]}


@pytest.mark.parametrize("input_mode", ["per_replica", "global_batch"])
def test_an_input_fn_that_returns_all_replicas_values_is_refused(input_mode):
    said = "_of_each returned a PerReplica, of which each replica would get all values"
    with pytest.raises(InputError, match=said) as caught:
        helpers.make(2).run(lambda x: x, _of_each, input_mode=input_mode)
    assert "\nFix: return the value of replica ctx.replica_id" in str(caught.value)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"x": [x]}])
def test_a_value_of_each_replica_is_no_global_batch(wrap):
    values = wrap(replicator.PerReplica([1, 2], [3, 4]))
    with pytest.raises(InputError, match="hold a PerReplica.*splits one batch"):
        helpers.make(2).run(lambda x: x, values, input_mode="global_batch")


ARGUMENTS = {
    "an iterator": (iter([1]), r"input_fn is list_iterator .*Fix: .*lambda: \.\.\."),
    "a number": (4, r"input_fn is int 4.*Fix: .*args=\(\.\.\.\)"),
    "a text": ("per_worker", r"input_fn is str 'per_worker'.*Fix: .*args="),
    "None inside": ((1.0, None), "input_fn holds NoneType None, which is not a tensor"),
    "nothing": ((), "input_fn holds no tensor"),
    "a Dataset inside": ((_dataset(), 1), "input_fn holds _RangeDataset .*a Dataset"),
    "a function inside": ((len, 1), "input_fn holds builtin.*a function"),
    "two parameters": (
        lambda a, b: _dataset(),
        "requires the arguments a, b.*InputContext",
    ),
    "keyword only": (
        lambda *, ctx: _dataset(),
        "requires the arguments ctx.*InputContext",
    ),
}


@pytest.mark.parametrize(("input_fn", "said"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_an_input_fn_takes_a_context_or_nothing(input_fn, said):
    with pytest.raises(InputError, match=f"(?s){said}"):
        helpers.make(2).run(lambda x: x, input_fn)


UNLIKE = {
    "structures": lambda ctx: 1 if ctx.replica_id else (1,),
    "keys": lambda ctx: {"b": 1} if ctx.replica_id else {"a": 1},
    "dtypes": lambda ctx: 1 if ctx.replica_id else 1.0,
    "datasets": lambda ctx: _dataset().map(lambda x: (x,) * (1 + ctx.replica_id)),
    "dtypes of datasets": lambda ctx: _dataset().map(
        lambda x: tf.cast(x, [tf.int32, tf.float32][ctx.replica_id])
    ),
    "ragged and dense": lambda ctx: (
        tf.ragged.constant([[1]]) if ctx.replica_id else tf.constant([[1]])
    ),
    "sparse and dense": lambda ctx: tf.sparse.eye(2) if ctx.replica_id else tf.eye(2),
    "functions": lambda ctx: (lambda: 1) if ctx.replica_id else (lambda: [1]),
}


@pytest.mark.parametrize("input_fn", UNLIKE.values(), ids=UNLIKE)
def test_replicas_are_fed_alike(input_fn):
    with pytest.raises(InputError) as caught:
        helpers.make(2).run(lambda x: 0, input_fn)
    message = str(caught.value)
    assert message.startswith("input_fn feeds the replicas differently.\n  replica 0: ")
    assert "\n  replica 1: " in message
    assert "\nFix: give the elements of all replicas the same structure" in message


def test_sizes_that_differ_are_no_difference():
    """A last batch may be smaller, and a replica's batches larger than the others'."""

    def input_fn(ctx):
        return _dataset().batch(2 + ctx.replica_id, drop_remainder=True)

    values = helpers.make(2).run(lambda x: x, input_fn)
    assert [len(value) for value in values] == [2, 3]


def test_kinds_are_not_mixed():
    def input_fn(ctx):
        return _dataset() if ctx.replica_id else tf.constant(1)

    with pytest.raises(
        InputError, match="input_fn returns different kinds .*a Dataset, a tensor"
    ) as caught:
        helpers.make(2).run(lambda x: x, input_fn)
    assert "Fix: return the same kind for every replica." in str(caught.value)


def test_an_input_mode_is_one_of_two():
    with pytest.raises(
        InputError,
        match="(?s)input_mode='per_host' is unknown.*per_replica, per_worker",
    ):
        helpers.make(2).run(lambda x: x, _dataset, input_mode="per_host")


@pytest.mark.parametrize(
    ("source", "kind"), [(lambda: 1, "a function"), (1, "a tensor structure")]
)
def test_per_worker_needs_a_dataset(source, kind):
    with pytest.raises(
        InputError, match=f'returned {kind} with input_mode="per_worker"'
    ) as caught:
        helpers.make(2).run(lambda x: x, lambda: source, input_mode="per_worker")
    assert 'Fix: return a tf.data.Dataset, or use input_mode="per_replica"' in str(
        caught.value
    )


class _OddError(Exception):
    """An exception that cannot be recreated from its message."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(code, where)
        self.code = code


@pytest.mark.parametrize("mode", ["eager", "session"])
@pytest.mark.parametrize("failing_replica", [0, 1])
def test_what_an_input_fn_raises_passes_and_the_next_run_works(mode, failing_replica):
    repl = helpers.make(2)
    error = _OddError(7, where="here")
    broken = [True]

    def input_fn(ctx):
        if broken[0] and ctx.replica_id == failing_replica:
            raise error
        return _dataset().shard(2, ctx.replica_id)

    def run() -> replicator.PerReplica:
        return repl.run(lambda x: x, input_fn)

    graph = tf.Graph().as_default() if mode == "session" else contextlib.nullcontext()
    with graph:
        for _ in range(2):
            with pytest.raises(_OddError) as caught:
                run()
            assert caught.value is error
            assert caught.value.args == (7, "here")
        broken[0] = False
        values = run()
        if mode == "session":
            with tf.compat.v1.train.MonitoredSession() as session:
                values = session.run(values)
        assert [int(x) for x in values] == [0, 1]


@pytest.mark.parametrize("mode", ["eager", "session"])
def test_what_a_function_of_an_input_fn_raises_passes(mode):
    error = _OddError(8, where="there")

    def source():
        raise error

    graph = tf.Graph().as_default() if mode == "session" else contextlib.nullcontext()
    with graph, pytest.raises(_OddError) as caught:
        helpers.make(2).run(lambda x: x, lambda: source)
    assert caught.value is error


def test_an_error_in_the_pipeline_ends_the_step_and_the_next_one_goes_on():
    """tf.data raises when the element is taken; the step does not happen."""
    repl = helpers.make(2)
    with repl.context():
        count = tf.Variable(0)

    def input_fn():
        return _dataset(6).map(
            lambda x: tf.debugging.check_numerics(1 / (x - 2), "bad")
        )

    def step_fn(x):
        count.assign_add(1)
        return x

    repl.run(step_fn, input_fn)
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad"):
        repl.run(step_fn, input_fn)
    assert count.numpy() == 1
    repl.run(step_fn, input_fn)
    assert count.numpy() == 2


@pytest.mark.parametrize("dealt", [True, False], ids=["dealt", "sharded"])
def test_a_pipeline_may_read_a_variable_that_input_fn_creates(dealt):
    repl = helpers.make(2)
    kept = []

    def input_fn(ctx=None):
        kept.append(tf.Variable(5, dtype=tf.int64))
        return _dataset().map(lambda x, own=kept[-1]: x + own)

    values = repl.run(lambda x: x, (lambda: input_fn()) if dealt else input_fn)
    assert [int(x) for x in values] == ([5, 6] if dealt else [5, 5])


def test_a_function_may_read_a_variable_that_input_fn_creates():
    kept = []

    def input_fn(ctx):
        kept.append(tf.Variable(5 + ctx.replica_id))
        return kept[-1].read_value

    values = helpers.make(2).run(lambda x: x, input_fn)
    assert [int(x) for x in values] == [5, 6]
