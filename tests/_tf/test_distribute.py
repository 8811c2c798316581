# SPDX-License-Identifier: Apache-2.0
"""tf.distribute answers as configured: each private name is called."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator._tf import distribute


def test_combined_context_sums_over_one_replica_without_an_op():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0)
        with distribute.distribution_mode(distribute.CombinedContext()):
            context = tf.distribute.get_replica_context()
            assert context.all_reduce("SUM", [x])[0] is x
            assert not tf.distribute.has_strategy()
            assert context.merge_call(lambda strategy, y: y, [x]) is x
        assert len(graph.get_operations()) == 1


def test_distribution_mode_answers_for_tf_distribute():
    before = tf.distribute.get_replica_context()
    ours = tf.distribute.ReplicaContext(distribute.default_strategy(), 1)
    with tf.Graph().as_default():
        with distribute.distribution_mode(replica=ours):
            assert tf.distribute.get_replica_context() is ours
            assert not tf.distribute.has_strategy()
            with distribute.distribution_mode():
                assert tf.distribute.get_replica_context() is before
            with distribute.distribution_mode(cross_replica="a strategy"):
                assert tf.distribute.in_cross_replica_context()
                assert not tf.distribute.has_strategy()
        assert tf.distribute.get_replica_context() is before


def test_distribution_mode_is_left_by_an_error():
    with tf.Graph().as_default():
        with (
            pytest.raises(ZeroDivisionError),
            distribute.distribution_mode(replica="ours"),
        ):
            raise ZeroDivisionError
        assert tf.distribute.get_replica_context() != "ours"


def test_default_strategy_is_found_in_the_scope_of_another():
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        assert tf.distribute.has_strategy()
        with distribute.distribution_mode(replica="ours"):
            assert tf.distribute.get_strategy() is distribute.default_strategy()


def test_who_takes_the_copy_of_a_replica_is_noticed_before():
    noticed = []

    class Context(distribute.WatchedContext):
        def before_copy(self):
            noticed.append("asked")

    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        variable = tf.Variable(1.0)
    copies = variable.values
    with distribute.distribution_mode(
        replica=Context(distribute.default_strategy(), 1)
    ):
        assert not noticed
        assert variable.handle is copies[1].handle
    assert noticed


def test_summaries_ask_for_the_condition_beside_the_users(tmp_path):
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        for wanted in (True, False):
            with distribute.summaries_if(lambda wanted=wanted: tf.constant(wanted)):
                with tf.summary.record_if(True):
                    assert bool(tf.summary.should_record_summaries()) == wanted
                with tf.summary.record_if(False):
                    assert not tf.summary.should_record_summaries()
        assert tf.summary.should_record_summaries()
