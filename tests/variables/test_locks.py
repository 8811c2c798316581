# SPDX-License-Identifier: Apache-2.0
"""One thread at a time holds the lock of steps; who would wait for ever is told so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator import errors
from replicator.variables import locks
from tests import helpers


def _in_a_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_others_wait_until_the_last_of_nested_blocks_is_left() -> None:
    lock, order = locks.StepLock(), []

    def enter() -> None:
        with lock:
            order.append("other")

    with lock:
        with lock:
            other = _in_a_thread(enter)
        other.join(0.03)
        assert other.is_alive() and not order
        order.append("first")
    other.join(5)
    assert order == ["first", "other"]


def test_an_error_inside_sets_it_free() -> None:
    lock = locks.StepLock()
    for block in (lock, lock.also_held()):
        with pytest.raises(ZeroDivisionError), block:
            raise ZeroDivisionError
    taken = []

    def enter() -> None:
        with lock.also_held():
            taken.append(True)

    _in_a_thread(enter).join(5)
    assert taken == [True]


def test_python_that_a_step_waits_for_may_not_wait_for_the_step() -> None:
    lock, said = locks.StepLock(), []

    def enter() -> None:
        try:
            with lock:
                said.append("entered")
        except errors.ContextError as error:
            said.append(str(error))

    def call(k: tf.Tensor) -> tf.Tensor:  # in a thread of TensorFlow's
        return tf.py_function(lambda k: (enter(), k)[1], [k], tf.int64)

    data = tf.data.Dataset.range(1).map(call)
    with lock:
        _in_a_thread(lambda: list(data)).join(5)
    assert len(said) == 1 and "have to wait for a step of this Replicator" in said[0]
    assert "Fix:" in said[0]
    list(data)
    assert said[1:] == ["entered"]


def test_two_that_wait_for_each_other_are_told_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locks, "_PATIENCE", 0.02)
    lock, ready, done = locks.StepLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            ready.set()
            done.wait(5)

    holder = _in_a_thread(hold)
    ready.wait(5)
    with pytest.raises(errors.ContextError, match="(?s)two Replicators.*one thread"):
        with lock.also_held():
            pass
    done.set()
    holder.join(5)
    with lock.also_held():
        pass


def test_an_assignment_waits_until_no_step_runs() -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(1.0)
    thread = threading.Thread(target=variable.assign, args=(2.0,))
    with variable.lock:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and float(variable) == 1.0
    thread.join()
    assert float(variable) == 2.0
