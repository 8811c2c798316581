# SPDX-License-Identifier: Apache-2.0
"""Calls by the public API equal fast ones, except in speed."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator._tf.plain import calls


def _traced(build):
    return tf.function(build, autograph=False).get_concrete_function()


def test_prepare_call_returns_flat_results_and_pack_results_what_was_returned():
    variable = tf.Variable([1.0, 2.0])
    function = _traced(lambda: [variable + 1.0, None, tf.sparse.eye(2), [3]])
    call = calls.prepare_call(function, only_cpus=True)
    variable.assign([2.0, 3.0])
    flat = call()
    assert [tensor.shape.rank for tensor in flat] == [1, 2, 1, 1, 0]
    dense, nothing, sparse, (three,) = calls.pack_results(function, flat)
    assert dense.numpy().tolist() == [3.0, 4.0]
    assert (nothing, int(three)) == (None, 3)
    assert tf.sparse.to_dense(sparse).numpy().tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert calls.prepare_call(_traced(lambda: None))() == []


def test_prepare_call_passes_no_gradient():
    variable = tf.Variable(3.0)
    call = calls.prepare_call(_traced(lambda: variable * 2.0))
    with tf.GradientTape() as tape:
        (doubled,) = call()
    assert tape.gradient(doubled, variable) is None


def test_prepare_call_raises_what_the_function_would():
    fine = tf.Variable(False)
    call = calls.prepare_call(
        _traced(lambda: [tf.debugging.assert_equal(fine, True)][1:])
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
        call()


def test_with_less_optimizing_changes_nothing():
    config = tf.compat.v1.ConfigProto()
    assert calls.with_less_optimizing(config, only_cpus=True) is config
