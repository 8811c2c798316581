# SPDX-License-Identifier: Apache-2.0
"""The profiler's output can be read: the private name is called."""

from __future__ import annotations

import time

import tensorflow as tf

from replicator._tf import profiles


def test_a_profile_says_which_ops_ran_and_how_long(tmp_path):
    @tf.function
    def multiplied(x):
        return tf.matmul(x, x, name="here")

    x = tf.ones([400, 400])
    multiplied(x)
    start = time.perf_counter()
    tf.profiler.experimental.start(str(tmp_path))
    multiplied(x).numpy()
    tf.profiler.experimental.stop()
    seconds = time.perf_counter() - start
    (file,) = tmp_path.rglob("*.xplane.pb")
    events = list(profiles.read_profile(file.read_bytes()))
    # oneDNN has its own types for some ops.
    (event,) = [event for event in events if event.name.startswith("here:")]
    assert isinstance(event, profiles.ProfileEvent)
    assert 0 < event.seconds < seconds
    assert event.plane.startswith("/host:")
