# SPDX-License-Identifier: Apache-2.0
"""A distributed session's unsupported programs are refused by name and line."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.autodist import refusals
from tests.autodist import helpers
from tests.autodist.test_session import scope

v1 = tf.compat.v1
HERE = r"test_refused\.py:\d+ in"


def _variable_outside():
    v = v1.get_variable("outside", [2])
    with (autodist := helpers.make(2)).scope():
        _ = v + 1
        autodist.create_distributed_session()


def _dealt(dtype):
    """Returns an iterator's element: dealt elements exist on no replica as a whole."""
    data = tf.data.Dataset.from_tensors(tf.ones([2], dtype)).repeat()
    return v1.data.make_one_shot_iterator(data).get_next()


def _mixed_loss(autodist):
    x = _dealt(tf.float32)
    w = tf.Variable(1.0)
    loss = tf.reduce_sum(w * x) + w * w
    v1.train.GradientDescentOptimizer(0.1).minimize(loss)
    autodist.create_distributed_session()


def _mean_of_integers(autodist):
    x = _dealt(tf.int32)
    n = tf.Variable(0)
    n.assign(x[0])
    autodist.create_distributed_session()


def _write_in_a_branch(autodist):
    x = _dealt(tf.float32)
    w = tf.Variable(0.0)
    mean = tf.reduce_mean(x)
    tf.cond(mean > 0, lambda: w.assign(mean) + 0, lambda: 0.0)
    autodist.create_distributed_session()


def _holds_a_state(autodist):
    v1.placeholder(tf.float32, [None])
    tf.raw_ops.Stage(values=[tf.constant(1.0)])
    autodist.create_distributed_session()


BUILDS = {
    _mixed_loss: (
        rf"the loss add.* adds a sum.*{HERE} _mixed_loss.*Fix",
        "Unsupported",
    ),
    _mean_of_integers: (
        rf"variable Variable is assigned a value.*{HERE} _mean_of_integers.*Fix",
        "Unsupported",
    ),
    _write_in_a_branch: (
        rf"writes variable Variable.*{HERE}.*Fix: compute the written",
        "Unsupported",
    ),
    _holds_a_state: (rf"Stage.* cannot be copied.*{HERE} _holds.*Fix", "Unsupported"),
}


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_what_cannot_be_copied_is_refused_by_name_and_line(build):
    message, kind = BUILDS[build]
    error = getattr(replicator, f"{kind}Error")
    with scope(2) as autodist, pytest.raises(error, match=f"(?s){message}"):
        build(autodist)


def test_a_variable_from_outside_of_the_scope_is_refused():
    with (
        tf.Graph().as_default(),
        pytest.raises(
            replicator.UnsupportedError,
            match=rf"(?s)variable outside was created outs.*{HERE} _variable_outside",
        ),
    ):
        _variable_outside()


RUNS = {
    "what Python computes": (
        lambda x: tf.ensure_shape(v1.py_func(lambda v: v[:1], [x], tf.float32), [1]),
        {},
        r"float32\(1,\).*is unknown.*neither a row for each example.*Fix",
    ),
    "whole numbers that Python computes": (
        lambda x: tf.ensure_shape(v1.py_func(np.argmax, [x], tf.int64), []),
        {},
        r"int64\(\), differs between replicas.*Fix",
    ),
    "fewer rows": (
        lambda x: tf.ensure_shape(v1.py_func(lambda v: v[1:], [x], tf.float32), [None]),
        {},
        r"has 1 rows on a replica of 2 examples.*Fix",
    ),
    "no tensor": (lambda x: "nothing:0", {}, r"cannot fetch 'nothing:0'.*Fix"),
    "a number": (lambda x: 3, {}, r"cannot fetch 3.*Fix"),
    "another graph": (
        lambda x: tf.compat.v1.Graph().create_op("NoOp", [], []),
        {},
        r"cannot fetch.*Fix",
    ),
    "a shape": (lambda x: x, [[1.0]], r"x:0, float32\(None,\), was fed.*\(1, 1\).*Fix"),
    "a text": (lambda x: x, ["a"], r"x:0.*was fed \['a'\].*Fix"),
    "nothing": (lambda x: x, [], r"hold no example.*x:0.*Fix"),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_has_no_value_for_all_examples_is_refused(name):
    fetch, feed, message = RUNS[name]
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None], "x")
        fetches = fetch(x)
        session = autodist.create_distributed_session()
        feed = [1.0, 2.0, 3.0, 5.0] if feed == {} else feed
        with pytest.raises(replicator.ArgumentError, match=f"(?s){message}"):
            session.run(fetches, {x: feed})
        assert session.run(x, {x: [1.0, 2.0]}).tolist() == [1, 2]  # it still works


def test_feeds_of_different_sizes_are_refused():
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None], "x")
        y = v1.placeholder(tf.float32, [None], "y")
        session = autodist.create_distributed_session()
        with pytest.raises(
            replicator.ArgumentError, match=r"(?s)differ in their first.*x:0.*y:0"
        ):
            session.run([x, y], {x: np.ones(4), y: np.ones(5)})
        with pytest.raises(replicator.ArgumentError, match=r"(?s)fed 'q'.*Fix"):
            session.run(x, {"q": 1})
        with pytest.raises(replicator.ArgumentError, match=r"(?s)feed_dict=3.*Fix"):
            session.run(x, 3)
        sparse = v1.sparse_placeholder(tf.float32)
        with pytest.raises(replicator.ArgumentError, match=r"(?s)SparseTensor.*Fix"):
            session.run(x, {sparse: 1})


def test_variables_of_imported_graphs_are_refused():
    with tf.Graph().as_default():
        v1.get_variable("w", [2])
        exported = v1.train.export_meta_graph()
    with scope() as autodist:
        v1.train.import_meta_graph(exported)
        with pytest.raises(
            replicator.UnsupportedError, match=r"(?s)variable w .*or imported.*a Saver"
        ):
            autodist.create_distributed_session()


def test_parts_of_a_run_are_refused():
    with scope(2) as autodist:
        session = autodist.create_distributed_session()
        for name in ("partial_run_setup", "partial_run"):
            with pytest.raises(replicator.UnsupportedError, match=f"(?s){name}.*Fix"):
                getattr(session, name)([])


def test_scopes_are_not_nested_and_sessions_are_made_in_one():
    with scope(2) as autodist:
        with pytest.raises(
            replicator.ContextError, match=r"(?s)inside another scope.*Fix"
        ):
            with autodist.scope():
                pass
    with pytest.raises(replicator.ContextError, match=r"(?s)outside of a scope.*Fix"):
        autodist.create_distributed_session()
    with pytest.raises(replicator.ClusterError, match=r"(?s)nowhere.yml.*Fix"):
        replicator.AutoDist("nowhere.yml")
    with pytest.raises(replicator.ArgumentError, match=r"(?s)'some'.*Fix"):
        replicator.AutoDist(["CPU:0"], "some")


def test_variables_that_nothing_can_mirror_are_named_with_their_lines():
    error = refusals.unbuildable({"w": "used in MapDataset"}, {"w": "train.py:3"})
    with pytest.raises(
        replicator.UnsupportedError,
        match=r"(?s)variable w, which.*w, used in MapD.*created at train\.py:3.*Fix",
    ):
        raise error
