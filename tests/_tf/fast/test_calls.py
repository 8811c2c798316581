# SPDX-License-Identifier: Apache-2.0
"""Fast calls equal plain ones: each private name is called."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator._tf import choice, graphs
from replicator._tf.fast import calls
from tests._tf import shared

pytestmark = pytest.mark.fast


def test_prepare_call_returns_flat_results_and_pack_results_what_was_returned():
    variable = tf.Variable([1.0, 2.0])
    function = shared.traced(lambda: [variable + 1.0, None, tf.sparse.eye(2), [3]])
    call = choice.prepare_call(function)
    variable.assign([2.0, 3.0])
    flat = call()
    assert [tensor.shape.rank for tensor in flat] == [1, 2, 1, 1, 0]
    dense, nothing, sparse, (three,) = choice.pack_results(function, flat)
    assert dense.numpy().tolist() == [3.0, 4.0]
    assert (nothing, int(three)) == (None, 3)
    assert tf.sparse.to_dense(sparse).numpy().tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert choice.prepare_call(shared.traced(lambda: None))() == []


def test_prepare_call_returns_resources_with_their_shapes():
    variable = tf.Variable([1.0, 2.0])
    (handle,) = choice.prepare_call(shared.traced(lambda: variable.handle))()

    @tf.function
    def read():
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

    assert read.get_concrete_function().output_shapes == [2]


def test_prepare_call_asks_for_what_is_captured_at_each_call():
    now = [tf.constant(1.0)]

    def build():
        graph = tf.compat.v1.get_default_graph()
        return graph.capture_call_time_value(lambda: now[0], tf.TensorSpec([])) + 1.0

    call = choice.prepare_call(shared.traced(build))
    assert float(call()[0]) == 2.0
    now[0] = tf.constant(5.0)
    assert float(call()[0]) == 6.0


def test_prepare_call_can_be_cancelled():
    manager = calls._cancellation.CancellationManager()
    call = choice.prepare_call(shared.traced(lambda: [tf.constant(1.0)]))
    assert float(manager.get_cancelable_function(call)()[0]) == 1.0
    manager.start_cancel()
    with pytest.raises(tf.errors.CancelledError):
        manager.get_cancelable_function(call)()


@pytest.mark.parametrize("only_cpus", [False, True])
def test_prepare_call_keeps_the_settings_of_the_process(only_cpus):
    runtime = calls._context.context()
    before = runtime.function_call_options
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=7)
    config.graph_options.rewrite_options.layout_optimizer = 1  # on
    try:
        runtime.function_call_options = calls._context.FunctionCallOptions(None, config)
        function = shared.traced(lambda: [tf.constant(2.0) * tf.constant(3.0)])
        assert float(choice.prepare_call(function, only_cpus)()[0]) == 6.0
        options = calls._call_options(only_cpus)
    finally:
        runtime.function_call_options = before
    config = tf.compat.v1.ConfigProto.FromString(options[-1])
    assert config.inter_op_parallelism_threads == 7
    assert config.graph_options.rewrite_options.layout_optimizer == 1


def test_prepare_call_raises_what_the_function_would():
    fine = tf.Variable(False)
    function = shared.traced(
        lambda: [tf.debugging.assert_equal(fine, True, "told")][1:]
    )
    with pytest.raises(tf.errors.InvalidArgumentError) as expected:
        function()
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        choice.prepare_call(function)()
    assert "Detected at node" in caught.value.message
    assert __file__ in caught.value.message
    lines = [e.value.message.splitlines()[:3] for e in (expected, caught)]
    assert lines[0] == lines[1]


def test_with_less_optimizing_keeps_what_users_say():
    on = 1
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=7)
    rewriter = config.graph_options.rewrite_options
    rewriter.layout_optimizer, rewriter.meta_optimizer_iterations = on, 2
    before = config.SerializeToString()
    options = choice.with_less_optimizing(config, only_cpus=True)
    assert config.SerializeToString() == before
    assert options.inter_op_parallelism_threads == 7
    options = options.graph_options.rewrite_options
    assert (options.layout_optimizer, options.meta_optimizer_iterations) == (on, 2)
    assert options.memory_optimization == 0  # as it was


@pytest.mark.parametrize("only_cpus", [False, True])
def test_with_less_optimizing_leaves_out_what_finds_nothing(only_cpus):
    options = choice.with_less_optimizing(graphs.session_config(), only_cpus)
    options = options.graph_options.rewrite_options
    assert (options.meta_optimizer_iterations, options.disable_tfg_optimizer) == (
        1,
        True,
    )
    assert (options.layout_optimizer == 2) == only_cpus  # off
