# SPDX-License-Identifier: Apache-2.0
"""Parts on several devices are saved as one tensor by every kind of v1 Saver."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.variables.placement import Mirrored, Owned
from tests import helpers
from tests.variables import parted

INITIAL = np.arange(20, dtype=np.float32).reshape(5, 4)


def _saver(repl: Any, sharded: bool) -> tuple[Any, Any]:
    with repl.context():
        v = tf.Variable(INITIAL, name="table")
    return v, tf.compat.v1.train.Saver([v], sharded=sharded)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_parts_on_several_devices_are_saved_and_restored_as_a_whole(
    axis: int, sharded: bool, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "model")
    sizes = [1, INITIAL.shape[axis] - 2, 1]
    what = parted.chosen(axis, sizes, [Owned(0), Mirrored(), Owned(1)])
    with tf.Graph().as_default():
        v, saver = _saver(parted.replicas(2, parted.As(what)), sharded)
        with helpers.session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(v.assign(INITIAL * 2))
            saved = saver.save(session, path)
            session.run(v.assign(INITIAL))
            saver.restore(session, saved)
            np.testing.assert_array_equal(session.run(v), INITIAL * 2)
    with tf.Graph().as_default():
        v, saver = _saver(parted.one_device(), sharded)
        with helpers.session() as session:
            saver.restore(session, saved)
            np.testing.assert_array_equal(session.run(v), INITIAL * 2)


def test_a_saver_that_renames_parts_is_refused() -> None:
    with tf.Graph().as_default():
        v, _ = _saver(parted.replicas(2), sharded=False)
        with pytest.raises(
            replicator.ReplicatorError,
            match=r"(?s)Saver cannot rename.*table:0.*Fix: give it a list",
        ):
            tf.compat.v1.train.Saver({"other": v})
