# SPDX-License-Identifier: Apache-2.0
"""Finds out from the Python stack which method of another library is running.

Optimizers and layers of Keras, Sonnet and TensorFlow 1 have no public way to tell what
they are doing. Each function looks for the frames of methods that it knows by name.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from typing import Any, NamedTuple

import tensorflow as tf


def variable_of_slot() -> Any:
    """Returns the variable that an optimizer is creating a slot for, or None.

    Optimizers of all families start from a function that takes the variable: Keras'
    add_variable_from_reference (legacy Keras' too, or its add_slot), tf.compat.v1's
    create_slot, Sonnet's variable_like. The arguments of the slot's own creation do not
    identify the variable.
    """
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_SLOT_DEPTH):
        if frame is None:
            return None
        names = _SLOT_MAKERS.get(frame.f_code.co_name.removeprefix("tf__"), ())
        for name in names:
            if name in frame.f_locals:
                return frame.f_locals[name]
        frame = frame.f_back
    return None


_SLOT_DEPTH = 40  # frames; AutoGraph and variable creators add theirs in between


_SLOT_MAKERS = {
    "add_variable_from_reference": ("reference_variable", "model_variable"),
    "add_slot": ("var",),
    "create_slot": ("primary",),
    "create_slot_with_initializer": ("primary",),
    "variable_like": ("inputs",),
}


def v1_optimizer_applying() -> bool:
    """Whether a v1 optimizer's `apply_gradients` is among the nearest callers."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_V1_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name == "apply_gradients" and (
            frame.f_globals.get("__name__") == "tensorflow.python.training.optimizer"
        ):
            return True
        frame = frame.f_back
    return False


_V1_DEPTH = 8  # frames from apply_gradients to the variable's handle, plus a margin


def asked_by_writer() -> bool:
    """Whether the code that reads a variable's `handle` is going to write through it.

    The writes of tf.compat.v1 and of some optimizers are not methods of a variable:
    they take its handle, write, and notify it afterwards or not at all. The rest of
    TensorFlow and its kin take the handle in order to read; user code may do anything.
    """
    asking = sys._getframe(2).f_globals.get("__name__", "")  # behind `handle`
    if re.match(r"(tensorflow|tf_keras|keras|sonnet|replicator)\.", asking):
        return bool(_BY_HANDLE.match(asking))
    return True


_BY_HANDLE = re.compile(
    r"tensorflow\.python\.(ops\.state_ops$|training\.(?!saving))"
    r"|(tensorflow\.python\.keras|tf_keras)\.(.*\.)?optimizer"
)


def asking_function_of_v1() -> str | None:
    """Returns the function of tf.compat.v1 that reads a variable's `handle` to write.

    Returns:
        Its name, "scatter_add" for example; None if another caller reads the handle.
    """
    frame = sys._getframe(2)  # behind `handle`
    is_one = frame.f_globals.get("__name__") == "tensorflow.python.ops.state_ops"
    return frame.f_code.co_name if is_one else None


def saver_asks() -> str | None:
    """Returns the function of the v1 Saver that asks for a variable's slice, or None.

    "op_list_to_dict" finds out how to save the variables in a list; what it sees in
    slices, "saveable_objects_for_op" then saves and restores through single handles.
    """
    frame = sys._getframe(2)  # behind `_save_slice_info`
    module = str(frame.f_globals.get("__name__"))
    is_saver = module == "tensorflow.python.training.saving.saveable_object_util"
    return frame.f_code.co_name if is_saver else None


def older_optimizer_asks() -> bool:
    """Whether an older optimizer of legacy Keras is reading a variable's `handle`.

    These write through it by ops of their own, and notify nobody.
    """
    asking = sys._getframe(2).f_globals.get("__name__", "")  # behind `handle`
    return bool(_OLDER.match(asking))


_OLDER = re.compile(
    r"(tensorflow\.python\.keras|tf_keras)\.(.*\.)?(optimizer_v2|legacy)(\.|$)"
)


def searched_op() -> str | None:
    """Returns the name of the op whose variable tf.custom_gradient is looking for.

    In a tf.Graph, it and tf.recompute_grad find the variables that a function reads by
    the ops that make their handles: they compare the `op` of each variable with those.

    Returns:
        The name; None if another caller reads a variable's `op`.
    """
    frame = sys._getframe(2)  # behind `op`
    if frame.f_globals.get("__name__") != "tensorflow.python.ops.custom_gradient":
        return None
    return frame.f_locals.get("var_name")


def optimizer_is_summing() -> bool:
    """Whether the caller runs inside a Keras optimizer that sums its own gradients.

    Keras' optimizers do so through tf.distribute, whatever gradients they take.
    """
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_SUM_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name.removeprefix("tf__") in _SUMMING:
            module = str(frame.f_globals.get("__name__"))
            return module.startswith(("keras.", "tf_keras."))
        frame = frame.f_back
    return False


_SUMMING = (
    "_all_reduce_sum_gradients",
    "all_reduce_sum_gradients",
    "_all_reduce_sum_fn",
)


_SUM_DEPTH = 8  # frames from these methods to the replica context, and AutoGraph's


_OPTIMIZERS = (
    "keras.src.optimizers",
    "sonnet.src.optimizers",
    "tf_keras.src.mixed_precision.loss_scale_optimizer",
    "tf_keras.src.optimizers",
    "tensorflow.python.training.",
)


def applying_optimizer() -> str | None:
    """Returns the class name of the optimizer whose `apply` is running, or None.

    Recognizes optimizers of all families.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        # AutoGraph converts Sonnet's methods, and prefixes their names with "tf__".
        name = frame.f_code.co_name.removeprefix("tf__")
        owner = type(frame.f_locals.get("self"))
        if name in ("apply", "apply_gradients") and any(
            base.__module__.startswith(_OPTIMIZERS) for base in owner.__mro__
        ):
            return owner.__name__
        frame = frame.f_back
    return None


def stateful_layer(variable: tf.Variable) -> Any:
    """Returns the stateful RNN layer whose call is writing its state, or None.

    Args:
        variable: The variable that is being written.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        is_call = frame.f_code.co_name.removeprefix("tf__") == "call"
        owner = frame.f_locals.get("self") if is_call else None
        if getattr(owner, "stateful", False) is True:
            states = tf.nest.flatten(getattr(owner, "states", None))
            if any(getattr(s, "value", s) is variable or s is variable for s in states):
                return owner
        frame = frame.f_back
    return None


@dataclasses.dataclass(frozen=True)
class Differentiation:
    """A running GradientTape.gradient or tf.gradients.

    Attributes:
        targets: The tensors being differentiated.
        given: The upstream gradient of each target, or None.
        call: An object that identifies the call while it is kept alive.
    """

    targets: list[Any]
    given: list[Any]
    call: Any


def differentiated() -> Differentiation | None:
    """Returns the running GradientTape.gradient or tf.gradients; None if there is none.

    A gradient function is told the gradients of its own op's results, but not what is
    being differentiated.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        names = _DIFFERENTIATING.get((_module(frame), frame.f_code.co_name))
        if names is not None:
            target, upstream, call = (frame.f_locals.get(name) for name in names)
            targets = _leaves(target)
            return Differentiation(
                targets, _leaves(upstream) or [None] * len(targets), call
            )
        frame = frame.f_back
    return None


# The locals that hold the targets, their upstream gradients, and a list or dict that is
# new in each call.
_DIFFERENTIATING = {
    ("tensorflow.python.eager.backprop", "gradient"): (
        "target",
        "output_gradients",
        "flat_targets",
    ),
    ("tensorflow.python.ops.gradients_util", "_GradientsHelper"): (
        "ys",
        "grad_ys",
        "grads",
    ),
}


def _leaves(what: Any) -> list[Any]:
    return [] if what is None else list(tf.nest.flatten(what, expand_composites=True))


def builder() -> str | None:
    """Returns the class name of the layer, model or optimizer whose `build` is running.

    Only of objects built inside a step; the stack around the step does not count. Keras
    has no public flag for a build in progress; all of its kinds set `built` once they
    have been.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "replicator.step.building":
            return None
        owner = frame.f_locals.get("self")
        if hasattr(owner, "built"):
            name = frame.f_code.co_name.removeprefix("tf__")
            if name in ("build", "_maybe_build"):  # the latter sets weights
                return type(owner).__name__
            if name == "call":  # Keras builds models without a `build` by calling them
                return None
        frame = frame.f_back
    return None


def strategy_asked_by_library() -> bool:
    """Whether TensorFlow or one of its kin is calling `tf.distribute.get_strategy`.

    They follow tf.distribute's conventions where it reports several replicas: Keras,
    for one, divides losses by their number, because its optimizers sum.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "get_strategy":
        frame = frame.f_back
    caller = frame and frame.f_back
    while caller is not None and _module(caller).startswith(_AUTOGRAPH):
        caller = caller.f_back
    return caller is not None and _module(caller).startswith(_ASKERS)


_AUTOGRAPH = "tensorflow.python.autograph."
_ASKERS = ("tensorflow.", "keras.", "tf_keras.", "sonnet.")


def copied_value_asking() -> Any:
    """Returns the tf.distribute variable that is looking up its replica's copy.

    It reads the replica id as an attribute, and indexes a tuple of copies with it. None
    if there is none.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame) != _VALUES + "_util":
        frame = frame.f_back
    caller = frame and frame.f_back
    if caller is None or _module(caller) != _VALUES:
        return None
    variable = caller.f_locals.get("self")
    return variable if isinstance(variable, tf.distribute.DistributedValues) else None


_VALUES = "tensorflow.python.distribute.values"


def keras_loop() -> str | None:
    """Returns which of Keras' training loops is running: "fit", "predict", ... or None.

    The stack around a step that is being built does not count, nor does a loop that
    calls Replicator for each batch, like that of `Replicator.keras_model`.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        module = _module(frame)
        if module.startswith(("replicator.step.building", "replicator.keras.")):
            return None
        name = frame.f_code.co_name.removeprefix("tf__")
        if name in _LOOPS and module in _TRAINERS:
            return name
        frame = frame.f_back
    return None


class KerasTraining(NamedTuple):
    """Keras' own training of a model, in a loop of its own."""

    loop: str
    optimizer: Any


def keras_training() -> KerasTraining | None:
    """Returns which loop of Keras updates variables, by an optimizer that is its own.

    None also where this library has a part in it: in a step, by a wrapped optimizer or
    in a loop that calls Replicator for each batch.
    """
    frame: types.FrameType | None = sys._getframe(1)
    optimizer = None
    while frame is not None:
        module = _module(frame)
        if module.startswith("replicator.") and not module.startswith(_OF_WRITES):
            return None
        name = frame.f_code.co_name.removeprefix("tf__")
        if name in ("apply", "apply_gradients"):
            found = frame.f_locals.get("self")
            if any(c.__module__.startswith(_OPTIMIZERS) for c in type(found).__mro__):
                optimizer = found
        if name in _LOOPS and module in _TRAINERS:
            return None if optimizer is None else KerasTraining(name, optimizer)
        frame = frame.f_back
    return None


_OF_WRITES = ("replicator.variables.", "replicator._tf.")
_LOOPS = (
    *("fit", "evaluate", "predict"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
)
_TRAINERS = ("keras.src.backend.tensorflow.trainer", "tf_keras.src.engine.training")


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
