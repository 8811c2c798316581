# SPDX-License-Identifier: Apache-2.0
"""Calls a traced step with less Python than its own call takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import cancellation as _cancellation
from tensorflow.python.eager import context as _context
from tensorflow.python.eager import execute as _execute
from tensorflow.python.eager.polymorphic_function import atomic_function as _atomic
from tensorflow.python.eager.polymorphic_function import concrete_function as _concrete
from tensorflow.python.ops import handle_data_util

_NEEDED = (
    _atomic.InterpolateRuntimeError,
    _cancellation.context,
    _concrete.ConcreteFunction.function_type,
    _concrete.ConcreteFunction.inference_fn,
    _context.context,
    _context.Context.function_call_options,
    _context.FunctionCallOptions.as_attrs,
    _execute.execute,
    _execute.execute_with_cancellation,
    handle_data_util.set_handle_data,
    tf.DType._handle_data,
    tf.__internal__.FuncGraph.deferred_external_captures,
    tf.compat.v1.ConfigProto().graph_options.rewrite_options.disable_tfg_optimizer,
)


def prepare_call(function: Any, only_cpus: bool = False) -> Callable[[], Any]:
    """Returns a function that runs a ConcreteFunction without arguments eagerly.

    A ConcreteFunction's own call binds arguments, asks all tapes about all captured
    tensors and packs the results by their types, which takes longer than a small step.
    None of this varies from call to call here, and no tape records. TensorFlow's
    annotations of errors are kept.

    Args:
        function: A ConcreteFunction.
        only_cpus: Whether all of its ops run on CPUs.

    Returns:
        A function that returns the flat results, in a list.
    """
    inference = function.inference_fn
    outputs = inference.function_type.flat_outputs
    name, count = inference.name.decode(), len(outputs)
    handles = [
        (index, handle_data.shape_inference)
        for index, handle_data in enumerate(spec.dtype._handle_data for spec in outputs)
        if handle_data is not None
    ]
    runtime, options = _context.context(), _call_options(only_cpus)
    is_deferred = bool(function.graph.deferred_external_captures)
    captured = [] if is_deferred else function.captured_inputs
    fixed = list(function.graph.external_captures)
    closures = list(function.graph.deferred_external_captures)

    def inputs_now() -> list[Any]:
        """Returns the `captured_inputs`, without a loop over the fixed ones."""
        values = [closure() for closure in closures]
        return fixed + tf.nest.flatten(values, expand_composites=True)

    def call() -> Any:
        inputs = inputs_now() if is_deferred else captured
        with (
            tf.profiler.experimental.Trace(function.graph.name),
            _atomic.InterpolateRuntimeError(inference),
        ):
            cancels = _cancellation.context()
            if cancels is None:
                results = _execute.execute(name, count, inputs, options, runtime)
            else:
                results = _execute.execute_with_cancellation(
                    name, count, inputs, options, runtime, cancels
                )
        for index, handle_data in handles:
            handle_data_util.set_handle_data(results[index], handle_data)
        return results or []

    return call


def _call_options(only_cpus: bool) -> tuple[Any, ...]:
    """Returns the attributes of a call, with the settings of `with_less_optimizing`."""
    options = _context.context().function_call_options
    config = tf.compat.v1.ConfigProto()
    config.ParseFromString(options.as_attrs()["config_proto"])
    settings = with_less_optimizing(config, only_cpus).SerializeToString(
        deterministic=True
    )
    return "executor_type", options.executor_type or "", "config_proto", settings


def with_less_optimizing(config: Any, only_cpus: bool) -> Any:
    """Returns a ConfigProto with fewer graph optimizations, for a faster first run.

    TensorFlow runs about a dozen optimizers over each graph, twice; most find nothing
    to do in a step of many replicas. Left out are the second iteration, which found
    nothing; the MLIR optimizers, which sort out control flow; and on CPUs, those that
    lay out images and move tensors for GPUs. The public settings hold for the whole
    process and do not cover these; those they do cover take precedence.

    Args:
        config: A ConfigProto, whose settings stay.
        only_cpus: Whether all of the replicas are on CPUs.
    """
    reduced = tf.compat.v1.ConfigProto()
    reduced.CopyFrom(config)
    rewriter = reduced.graph_options.rewrite_options
    choice = type(rewriter)
    if rewriter.meta_optimizer_iterations == choice.DEFAULT_NUM_ITERS:
        rewriter.meta_optimizer_iterations = choice.ONE
    rewriter.disable_tfg_optimizer = True
    if only_cpus and rewriter.layout_optimizer == choice.DEFAULT:
        rewriter.layout_optimizer = choice.OFF
        rewriter.memory_optimization = choice.NO_MEM_OPT
    return reduced


def pack_results(function: Any, flat: Sequence[tf.Tensor]) -> Any:
    """Packs flat results into the structure that the traced function returned."""
    return function.function_type.pack_output(flat)
