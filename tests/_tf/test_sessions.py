# SPDX-License-Identifier: Apache-2.0
"""Runs of sessions that leave the graph alone."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator._tf import sessions

v1 = tf.compat.v1


def test_a_session_callable_runs_what_was_there_when_it_was_made():
    with tf.Graph().as_default() as graph, v1.Session() as session:
        x = v1.placeholder(tf.float32, [None])
        count = v1.get_variable("count", initializer=0, use_resource=True)
        session.run(count.initializer)
        add = v1.assign_add(count, 1).op
        run = sessions.session_callable(session, [x * 2], [add], [x])
        before = len(graph.get_operations())
        # An op that no runtime takes, as those that a build has yet to replace.
        tf.raw_ops.PyFuncStateless(input=[], token="no such", Tout=[tf.float32])
        for _ in range(2):
            (twice,) = run(np.float32([1.0, 3.0]))
            np.testing.assert_array_equal(twice, [2.0, 6.0])
        assert len(graph.get_operations()) == before + 1
        assert session.run(count) == 2


def test_a_session_callable_takes_options_and_metadata():
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [])
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        run = sessions.session_callable(session, [tf.square(x)], [], [x], options)
        metadata = v1.RunMetadata()
        assert run(np.float32(3.0), run_metadata=metadata) == [9.0]
        assert metadata.step_stats.dev_stats


def test_indexed_slices_value_is_what_sessions_return():
    with tf.Graph().as_default(), v1.Session() as session:
        slices = tf.IndexedSlices(
            tf.ones([1, 2]), tf.constant([3]), tf.constant([4, 2])
        )
        assert isinstance(session.run(slices), sessions.IndexedSlicesValue)


def test_a_session_that_is_left_is_not_closed_but_cannot_run():
    with tf.Graph().as_default():
        session = v1.Session()
        x = tf.constant(1.0)
        sessions.leave_session(session)
        session.close()
        with pytest.raises(RuntimeError, match="closed Session"):
            session.run(x)
