# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a resumed run equals an uninterrupted one."""

from __future__ import annotations

import os
import signal
import threading
import types

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.hosts import checkpoints, connection
from tests import forks, helpers
from tests.cluster import servers


class _Training:
    """Counts and reads; a step's result depends on all earlier steps."""

    def __init__(self, folder, dataset):
        self.repl = helpers.make(2)
        with self.repl.context():
            self.v = tf.Variable(1.0)
        self.dataset = dataset
        objects = {"v": self.v, "inputs": self.repl.inputs}
        self.checkpoint = replicator.Checkpoint(folder, objects)

    def step(self):
        def step_fn(x):
            total = self.repl.all_reduce(tf.cast(x, tf.float32))
            return self.v.assign(self.v * 1.125 + total)

        return float(self.repl.run(self._once(step_fn), self.dataset)[0])

    def _once(self, step_fn):
        self._step = getattr(self, "_step", step_fn)
        return self._step


def _dataset():
    return tf.data.Dataset.range(60).shuffle(20, seed=3).repeat()


def test_goes_on_as_if_nothing_had_happened(tmp_path):
    whole = _Training(tmp_path / "whole", _dataset())
    losses = [whole.step() for _ in whole.checkpoint.steps(20, every=7)]
    assert os.path.basename(whole.checkpoint.latest) == "ckpt-20"
    again = _Training(tmp_path / "cut", _dataset())
    for k in again.checkpoint.steps(20, every=4):
        assert again.step() == losses[k]
        if k == 10:
            break
    resumed = _Training(tmp_path / "cut", _dataset())
    assert resumed.checkpoint.step == 8
    rest = [resumed.step() for _ in resumed.checkpoint.steps(20, every=4)]
    assert rest == losses[8:]
    training = _Training(tmp_path / "cut", _dataset())
    assert list(training.checkpoint.steps(20)) == []
    assert float(training.v) == losses[-1]


def test_sigterm_saves_and_ends(tmp_path):
    training = _Training(tmp_path, _dataset())
    before = signal.getsignal(signal.SIGTERM)
    steps = training.checkpoint.steps(20, every=6)
    with pytest.raises(SystemExit) as ended:
        for k in steps:
            if k == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            last = training.step()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    again = _Training(tmp_path, _dataset())
    assert again.checkpoint.step == 4  # the current step was finished
    assert float(again.v) == last


@pytest.fixture
def received():
    """The SIGTERMs that the program's own handler received."""
    numbers = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("failure", [ValueError, None], ids=["raises", "leaves"])
def test_sigterm_in_a_step_that_is_not_finished_is_the_programs(
    tmp_path, received, failure
):
    checkpoint = replicator.Checkpoint(tmp_path, {"v": tf.Variable(1.0)})
    try:
        for _ in checkpoint.steps(20):
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == []
            if failure is None:
                break
            raise failure
    except ValueError:
        pass
    assert received == [signal.SIGTERM]
    assert checkpoint.latest is None


def test_sigterm_while_hosts_are_lost_ends_the_program(tmp_path, received, monkeypatch):
    checkpoint = replicator.Checkpoint(tmp_path, {"v": tf.Variable(1.0)})
    counted = []

    def train(cluster):
        counted.append(len(received))
        for _ in checkpoint.steps(20):
            if len(counted) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                raise replicator.HostLostError("a host is lost")

    cluster = types.SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(connection, "connect", lambda *_, **__: cluster)
    replicator.resilient(train, ["a:1"])
    assert counted == [0, 1]  # the default handler would have ended it here


def test_other_threads_have_no_handler(tmp_path):
    training = _Training(tmp_path, _dataset())
    counted = []
    thread = threading.Thread(
        target=lambda: counted.extend(training.checkpoint.steps(3))
    )
    thread.start()
    thread.join(60)
    assert counted == [0, 1, 2]


def test_as_many_are_kept_as_asked_for(tmp_path):
    checkpoint = checkpoints.Checkpoint(tmp_path, {"v": tf.Variable(1.0)}, 2)
    for _ in checkpoint.steps(5, every=1):
        pass
    names = {path.stem for path in tmp_path.glob("*.index")}
    assert names == {"ckpt-4", "ckpt-5"}


_KILLED = """
import os, random, sys, threading
import tensorflow as tf
import replicator
v = tf.Variable(tf.zeros([100000]))
checkpoint = replicator.Checkpoint(sys.argv[1], {"v": v})
for step in checkpoint.steps(10**6, every=1):
    v.assign_add(tf.ones([100000]))
    if step == 5:  # killed while one of the next is being written
        threading.Timer(random.uniform(0, 0.05), os._exit, [9]).start()
"""


def test_killed_while_it_is_written(tmp_path):
    result = forks.run(["-c", _KILLED, tmp_path], servers.environment())
    assert result.returncode == 9, result.stderr[-2000:]
    v = tf.Variable(tf.zeros([100000]))
    checkpoint = replicator.Checkpoint(tmp_path, {"v": v})
    assert checkpoint.step >= 5
    np.testing.assert_array_equal(v, np.full([100000], checkpoint.step))


@pytest.mark.parametrize("bad", [{"keep": 0}, {"keep": True}, {"keep": "3"}])
def test_how_many_are_kept_is_a_number(tmp_path, bad):
    with pytest.raises(replicator.ArgumentError, match="checkpoint was given keep="):
        checkpoints.Checkpoint(tmp_path, {}, **bad)


@pytest.mark.parametrize("bad", [{"total": 0}, {"total": 5, "every": 0.5}])
def test_steps_are_numbers(tmp_path, bad):
    checkpoint = checkpoints.Checkpoint(tmp_path, {})
    with pytest.raises(replicator.ArgumentError, match="steps was given"):
        checkpoint.steps(**{"total": 5, **bad})


def test_what_cannot_be_held_is_refused(tmp_path):
    with pytest.raises(
        replicator.ArgumentError, match=r"(?s)given v=3, which tf.train.Ch.*repl.inputs"
    ):
        checkpoints.Checkpoint(tmp_path, {"v": 3})
