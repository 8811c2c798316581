# SPDX-License-Identifier: Apache-2.0
"""Which method of another library is running, by the frames of the Python stack.

Optimizers and layers of Keras, Sonnet and TensorFlow 1 do not say what they are at.
Each function looks for the frames of the methods that it knows by name.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from typing import Any

import tensorflow as tf


def variable_of_slot() -> Any:
    """Returns the variable for which an optimizer is creating a slot now, or None.

    Those of all families start from a function that is given the variable: Keras'
    add_variable_from_reference (legacy Keras' too, or its add_slot), tf.compat.v1's
    create_slot, Sonnet's variable_like.
    What they pass to the creation of the slot does not say which variable it is.
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


_SLOT_DEPTH = 40  # frames; autograph and variable creators stand in between


_SLOT_MAKERS = {
    "add_variable_from_reference": ("reference_variable", "model_variable"),
    "add_slot": ("var",),
    "create_slot": ("primary",),
    "create_slot_with_initializer": ("primary",),
    "variable_like": ("inputs",),
}


def v1_optimizer_applying() -> bool:
    """Whether the caller is called by a v1 optimizer's `apply_gradients`, closely."""
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


_V1_DEPTH = 8  # frames from apply_gradients to the variable's handle, and some more


def asked_by_writer() -> bool:
    """Whether what asks for a variable's handle means to write what is behind it.

    The writes of tf.compat.v1 and of some optimizers are no methods of a variable: they
    ask for its handle, write, and tell it afterwards or not at all. The rest of
    TensorFlow and its kin ask in order to read; a user's own code may do anything.
    """
    asking = sys._getframe(2).f_globals.get("__name__", "")  # behind `handle`
    if re.match(r"(tensorflow|tf_keras|keras|sonnet|replicator)\.", asking):
        return bool(_BY_HANDLE.match(asking))
    return True


_BY_HANDLE = re.compile(
    r"tensorflow\.python\.(ops\.state_ops$|training\.(?!saving))"
    r"|(tensorflow\.python\.keras|tf_keras)\.(.*\.)?optimizer"
)


def older_optimizer_asks() -> bool:
    """Whether what asks for a variable's handle is an older optimizer of legacy Keras.

    These write what is behind it, by ops of their own, and tell nobody.
    """
    asking = sys._getframe(2).f_globals.get("__name__", "")  # behind `handle`
    return bool(_OLDER.match(asking))


_OLDER = re.compile(
    r"(tensorflow\.python\.keras|tf_keras)\.(.*\.)?(optimizer_v2|legacy)(\.|$)"
)


def optimizer_is_summing() -> bool:
    """Whether the caller is called by a Keras optimizer that sums its gradients.

    Keras' optimizers do that by tf.distribute on their own, whatever they are given.
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


_SUM_DEPTH = 8  # frames from there to the replica context, and those of autograph


_OPTIMIZERS = (
    "keras.src.optimizers",
    "sonnet.src.optimizers",
    "tf_keras.src.mixed_precision.loss_scale_optimizer",
    "tf_keras.src.optimizers",
    "tensorflow.python.training.",
)


def applying_optimizer() -> str | None:
    """Returns the class of the optimizer whose `apply` is running, of any family."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        # Autograph converts Sonnet's methods, and puts "tf__" before their names.
        name = frame.f_code.co_name.removeprefix("tf__")
        owner = type(frame.f_locals.get("self"))
        if name in ("apply", "apply_gradients") and any(
            base.__module__.startswith(_OPTIMIZERS) for base in owner.__mro__
        ):
            return owner.__name__
        frame = frame.f_back
    return None


def given_to_metric() -> list[Any] | None:
    """Returns what the running `update_state` of a Keras metric was given, if any."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code, given = frame.f_code, frame.f_locals
        owner = type(given.get("self"))
        if code.co_name.removeprefix("tf__") == "update_state" and any(
            base.__module__.startswith(_METRICS) for base in owner.__mro__
        ):
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            return [given[name] for name in names if name in given and name != "self"]
        frame = frame.f_back
    return None


_METRICS = ("keras.src.metrics", "tf_keras.src.metrics")


@dataclasses.dataclass(frozen=True)
class Differentiation:
    """A running GradientTape.gradient, or tf.gradients.

    Attributes:
        targets: What is being differentiated.
        given: The gradients that were given of it; None for each where nothing was.
        call: What is another object for each call, while this one is kept.
    """

    targets: list[Any]
    given: list[Any]
    call: Any


def differentiated() -> Differentiation | None:
    """Returns the running GradientTape.gradient, or tf.gradients; None if neither is.

    A gradient function is told only how its own op's results matter, and not to what.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        names = _DIFFERENTIATING.get((_module(frame), frame.f_code.co_name))
        if names is not None:
            what, given, own = (frame.f_locals.get(name) for name in names)
            targets = _leaves(what)
            return Differentiation(
                targets, _leaves(given) or [None] * len(targets), own
            )
        frame = frame.f_back
    return None


# The names of what is differentiated, what is given of it, and of a list or a dict that
# each call makes anew.
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
    """Returns the class of the layer, model or optimizer whose `build` is running.

    Of those that a step builds: what is around the step does not count. Keras keeps in
    no public place that an object is being built; all of its kinds note in `built` that
    they have been.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "replicator.step.building":
            return None
        owner = frame.f_locals.get("self")
        if hasattr(owner, "built"):
            name = frame.f_code.co_name.removeprefix("tf__")
            if name in ("build", "_maybe_build"):  # in the latter, weights are set
                return type(owner).__name__
            if name == "call":  # Keras calls models that have no `build`, to build them
                return None
        frame = frame.f_back
    return None


def strategy_asked_by_library() -> bool:
    """Whether `tf.distribute.get_strategy` is called by TensorFlow or one of its kin.

    They follow the conventions of tf.distribute where it names several replicas: Keras,
    for one, divides losses by their number, because its optimizers add up.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "get_strategy":
        frame = frame.f_back
    asker = frame and frame.f_back
    while asker is not None and _module(asker).startswith(_AUTOGRAPH):
        asker = asker.f_back
    return asker is not None and _module(asker).startswith(_ASKERS)


_AUTOGRAPH = "tensorflow.python.autograph."
_ASKERS = ("tensorflow.", "keras.", "tf_keras.", "sonnet.")


def copied_value_asking() -> Any:
    """Returns the tf.distribute variable that asks which replica's copy is meant.

    It asks by an attribute, and takes the copy of that number from a tuple.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame) != _VALUES + "_util":
        frame = frame.f_back
    asker = frame and frame.f_back
    if asker is None or _module(asker) != _VALUES:
        return None
    found = asker.f_locals.get("self")
    return found if isinstance(found, tf.distribute.DistributedValues) else None


_VALUES = "tensorflow.python.distribute.values"


def keras_loop() -> str | None:
    """Returns which of Keras' training loops is running: "fit", "predict", ...

    What is around a step that is being built does not count, nor does a loop that
    calls Replicator for each batch, as that of `Replicator.keras_model` does.
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


_LOOPS = (
    *("fit", "evaluate", "predict"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
)
_TRAINERS = ("keras.src.backend.tensorflow.trainer", "tf_keras.src.engine.training")


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
