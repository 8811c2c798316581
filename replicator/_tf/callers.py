# SPDX-License-Identifier: Apache-2.0
"""Who is calling: TensorFlow and Keras do not tell the code that they call.

Two functions look at the Python stack, `asker` and `calls`. Each use of them says why
no public call suffices.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf


class Asker(NamedTuple):
    """A function that reads an attribute of an object, or calls its method.

    Attributes:
        module: The name of its module; "" if nothing is known.
        function: Its name.
    """

    module: str
    function: str


def asker(of: str) -> Asker:
    """Returns the function that reads the running property, or calls the function.

    TensorFlow writes variables through `handle` without notifying the variable:
    `gen_training_ops.resource_apply_adam(var.handle, ...)` in training/adam.py, say. So
    the caller shows whether a variable's handle is about to be written.

    Args:
        of: The name of the property or function.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != of:
        frame = frame.f_back
    frame = frame and frame.f_back
    while frame is not None and _module(frame).startswith(_AUTOGRAPH):
        frame = frame.f_back
    if frame is None:
        return Asker("", "")
    # AutoGraph puts branches into functions of its own, inside of tf__NAME.
    converted = re.search(r"\btf__(\w+)", frame.f_code.co_qualname)
    name = converted[1] if converted else frame.f_code.co_name
    return Asker(_module(frame), name)


_AUTOGRAPH = "tensorflow.python.autograph."


class RunningCall(NamedTuple):
    """A running call.

    Attributes:
        function: The function's name.
        values: The current values of its arguments and other local names.
        parameters: The names of its arguments.
    """

    function: str
    values: Mapping[str, Any]
    parameters: tuple[str, ...]


def calls(
    functions: Container[str],
    module: str | tuple[str, ...] = "",
    until: tuple[str, ...] = (),
    max_frames: int = sys.maxsize,
) -> Iterator[RunningCall]:
    """Yields the running calls of certain functions, innermost first.

    Args:
        functions: The names of the functions.
        module: What the names of their modules begin with.
        until: What the names of those modules begin with at which the search ends.
        max_frames: The number of frames to look at.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and max_frames:
        # AutoGraph prefixes the names of what it converts, e.g. Sonnet's methods.
        name = frame.f_code.co_name.removeprefix("tf__")
        if until and _module(frame).startswith(until):
            return
        if name in functions and _module(frame).startswith(module):
            code = frame.f_code
            count = code.co_argcount + code.co_kwonlyargcount
            yield RunningCall(name, frame.f_locals, code.co_varnames[:count])
        frame, max_frames = frame.f_back, max_frames - 1


def variable_of_slot() -> Any:
    """Returns the variable that an optimizer is creating a slot for, or None.

    Optimizers of all families start from a function that takes the variable: Keras'
    add_variable_from_reference (legacy Keras' too, or its add_slot), tf.compat.v1's
    create_slot, Sonnet's variable_like. The arguments of the slot's own creation do not
    identify the variable: Keras' base_optimizer.py passes on a shape and a name.
    """
    for call in calls(_SLOT_MAKERS, max_frames=_SLOT_DEPTH):
        for name in _SLOT_MAKERS[call.function]:
            if name in call.values:
                return call.values[name]
    return None


_SLOT_DEPTH = 40  # frames; AutoGraph and variable creators add theirs in between


_SLOT_MAKERS = {
    "add_variable_from_reference": ("reference_variable", "model_variable"),
    "add_slot": ("var",),
    "create_slot": ("primary",),
    "create_slot_with_initializer": ("primary",),
    "variable_like": ("inputs",),
}


def searched_op() -> str | None:
    """Returns the name of the op whose variable tf.custom_gradient is looking for.

    In a tf.Graph, it and tf.recompute_grad find the variables that a function reads by
    the ops that make their handles: custom_gradient.py compares `variable.op.name` of
    each variable with those.

    Returns:
        The name; None if another caller reads a variable's `op`.
    """
    module = "tensorflow.python.ops.custom_gradient"
    for call in calls(("get_variable_by_name",), module, max_frames=_SEARCH_DEPTH):
        return call.values["var_name"]
    return None


_SEARCH_DEPTH = 6  # frames from a variable's `op` to that function, and a margin


def applying_optimizer() -> Any:
    """Returns the optimizer, of any family, whose `apply` is running, or None.

    It assigns to variables like anyone else: Keras' `update_step` calls
    `variable.assign_sub(...)`.
    """
    for call in calls(("apply", "apply_gradients")):
        optimizer = call.values.get("self")
        if any(c.__module__.startswith(_OPTIMIZERS) for c in type(optimizer).__mro__):
            return optimizer
    return None


_OPTIMIZERS = (
    "keras.src.optimizers",
    "sonnet.src.optimizers",
    "tf_keras.src.mixed_precision.loss_scale_optimizer",
    "tf_keras.src.optimizers",
    "tensorflow.python.training.",
)


class MetricCall(NamedTuple):
    """A running method of a Keras metric.

    Attributes:
        metric: The metric.
        arguments: The current values of the method's arguments, by name.
    """

    metric: Any
    arguments: dict[str, Any]


def metric_call(method: str) -> MetricCall | None:
    """Returns the innermost running call of a method of Keras metrics, if any.

    A variable cannot know which metric reads or writes it, nor the metric's arguments:
    `Mean.update_state` calls `self.total.assign(self.total + total)`.

    Args:
        method: Its name, e.g. "update_state".
    """
    for call in calls((method,)):
        metric = call.values.get("self")
        if any(c.__module__.startswith(_METRICS) for c in type(metric).__mro__):
            names = (x for x in call.parameters if x in call.values and x != "self")
            return MetricCall(metric, {name: call.values[name] for name in names})
    return None


def is_mean(metric: Any) -> bool:
    """Whether a Keras metric is a Mean of values that it receives or computes."""
    return any(
        base.__name__ == "Mean" and base.__module__.startswith(_METRICS)
        for base in type(metric).__mro__
    )


_METRICS = ("keras.src.metrics", "tf_keras.src.metrics")


def stateful_layer(variable: tf.Variable) -> Any:
    """Returns the stateful RNN layer whose call is writing its state, or None.

    It assigns to the variable like any other layer, in `RNN.call`.

    Args:
        variable: The variable that is being written.
    """
    for call in calls(("call",)):
        layer = call.values.get("self")
        if getattr(layer, "stateful", False) is True:
            states = tf.nest.flatten(getattr(layer, "states", None))
            if any(getattr(s, "value", s) is variable or s is variable for s in states):
                return layer
    return None


def builder() -> str | None:
    """Returns the class name of the layer, model or optimizer whose `build` is running.

    Only of objects built inside a step; the stack around the step does not count. Keras
    has no public flag for a build in progress; all of its kinds set `built` once they
    have been.
    """
    # Keras builds models without a `build` by calling them; `_maybe_build` sets
    # weights.
    names = ("build", "_maybe_build", "call")
    for call in calls(names, until=("replicator.step.building",)):
        owner = call.values.get("self")
        if hasattr(owner, "built"):
            return None if call.function == "call" else type(owner).__name__
    return None


def keras_loop() -> str | None:
    """Returns which of Keras' training loops is running: "fit", "predict", ... or None.

    The stack around a step that is being built does not count, nor does a loop that
    calls Replicator for each batch, like that of `Replicator.keras_model`. The loops
    tell their callbacks that they run, but no variable.
    """
    until = ("replicator.step.building", "replicator.keras.")
    return next((call.function for call in calls(_LOOPS, _TRAINERS, until)), None)


_LOOPS = ("fit", "train_on_batch")  # those that train
_TRAINERS = ("keras.src.backend.tensorflow.trainer", "tf_keras.src.engine.training")


def output_gradients_of_pass() -> list[Any] | None:
    """Returns the gradients with which the running pass began; None without a pass.

    A pass is a call of GradientTape.gradient or tf.gradients. A gradient function
    receives the gradients of its own op's results, but does not learn that a pass calls
    it, nor the `output_gradients` of the pass.
    """
    for call in calls(_GRADIENT_ARGUMENTS, _PASSES):
        gradients = call.values.get(_GRADIENT_ARGUMENTS[call.function])
        return list(tf.nest.flatten(gradients, expand_composites=True))
    return None


_PASSES = "tensorflow.python.eager.backprop", "tensorflow.python.ops.gradients_util"
_GRADIENT_ARGUMENTS = {"gradient": "output_gradients", "_GradientsHelper": "grad_ys"}


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
