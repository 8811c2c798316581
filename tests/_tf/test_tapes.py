# SPDX-License-Identifier: Apache-2.0
"""Tapes: each private name is called."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator._tf import tapes


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_record_gradient_is_what_tapes_use(mode):
    def differentiate():
        x = tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tapes.stop_recording():
                y = x * 1.0
            tapes.record_gradient("test", [y], [x], lambda d: [d * 10.0])
            z = y * 2.0
        return tape.gradient(z, x)

    call = tf.function(differentiate, autograph=False)
    gradient = (call if mode == "function" else differentiate)()
    assert float(gradient) == 20.0


def test_stop_recording_reaches_the_tapes_of_callers():
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with tapes.stop_recording():
            y = x * 2.0
    assert tape.gradient(y, x) is None


def test_may_record_where_there_is_a_tape_or_an_accumulator():
    assert not tapes.may_record()
    with tf.GradientTape():
        assert tapes.may_record()
        with tapes.stop_recording():
            assert not tapes.may_record()
    with tf.autodiff.ForwardAccumulator(tf.constant(1.0), tf.constant(1.0)):
        assert tapes.may_record()


def test_ones_that_gradients_create_begin_no_pass() -> None:
    """Neither those of TensorFlow's gradients, nor of recorded and users' own ones."""

    @tf.custom_gradient
    def own(z):
        return tf.identity(z), lambda d: d * tf.ones(tf.shape(d))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.identity(x)
            with tf.GradientTape.stop_recording(tape):
                z = y * 2.0
            tapes.record_gradient("z", [z], [y], lambda d: [d * tf.ones_like(d)])
            result = tf.reduce_mean(own(tf.reduce_prod(z) + z))
        tape.gradient(result, x)
        begun = tapes.pass_starts(x.graph)
        begins = [op.name for op in x.graph.get_operations() if tapes.begins_pass(op)]
        return tf.constant(len(begun)), tf.constant(len(begins))

    assert [int(n) for n in step(tf.ones([2]))] == [1, 1]


@pytest.mark.parametrize("version", [1, 2])
def test_a_pass_is_told_from_the_ops_before_and_after_it(version):
    @tf.function(autograph=False)
    def step(x):
        before = tf.ones_like(x) * tf.tanh(x)
        results = []
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.tanh(x)
            results.append(tape.gradient(y, x) if version == 2 else tf.gradients(y, x))
        first, second = (tf.nest.flatten(result)[0] for result in results)
        after = second * 2.0
        parts = [tapes.is_part_of_pass(t.op) for t in (before, y, first, second, after)]
        assert parts == [False, False, True, True, False]
        begun = tapes.pass_starts(after.graph)
        ends = [tapes.number_of(t.op) for t in (before, first, second)]
        assert ends[0] < begun[0] < ends[1] < begun[1] < ends[2] and len(begun) == 2
        begins = [op for op in after.graph.get_operations() if tapes.begins_pass(op)]
        assert {tapes.number_of(op) for op in begins} >= set(begun)
        return after

    step(tf.ones([2]))


def test_differentiated_by_tf_gradients_and_no_other() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.constant(2.0)
        y = tf.tanh(x)
        (gradient,) = tf.gradients(y, x)
        found = {tapes.differentiated_by(op) for op in graph.get_operations()}
        assert tapes.differentiated_by(gradient.op) is y.op
        assert found == {None, y.op}


def test_is_recorded_by_a_tape_that_watches_a_tensor():
    x, y = tf.constant(1.0), tf.constant(2.0)
    assert not tapes.is_recorded([x])
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert tapes.is_recorded([y, x]) and not tapes.is_recorded([y])
    assert not tapes.is_recorded([x])
