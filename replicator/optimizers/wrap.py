# SPDX-License-Identifier: Apache-2.0
"""wrap_optimizer: gradients are combined over the replicas before they are applied.

Wrapping an optimizer creates a second object that shares its state. The new object's
class is created on the spot and derives from the optimizer's own, so it passes for the
original in isinstance, config and checkpoints; only `apply` differs. Each family has an
adapter in a file of its own, which says which method that is and how the family creates
its slots.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator import arguments, context, errors
from replicator.compressors import specs
from replicator.optimizers.keras import KerasAdapter
from replicator.optimizers.legacy_keras import LEGACY_KERAS, LegacyKerasAdapter
from replicator.optimizers.sonnet import SonnetAdapter
from replicator.optimizers.v1 import V1Adapter
from replicator.optimizers.wrapped import Wrapped
from replicator.primitives import base
from replicator.variables.replicated import plain
from replicator.variables.seen_as_one import SeenAsOne
from replicator.world import World

OPS = ("mean", "sum")


def wrap_optimizer(
    optimizer: Any,
    world: World,
    op: str = "mean",
    accumulation_steps: int = 1,
    creating: Callable[[], Any] = contextlib.nullcontext,
    compressor: Any = None,
) -> Any:
    """Returns an optimizer that combines gradients; see Replicator.wrap_optimizer.

    Args:
        optimizer: As there.
        world: The replicas whose gradients are combined.
        op: As there.
        accumulation_steps: As there.
        creating: Returns a block in which new variables are replicated.
        compressor: As there.
    """
    compressor = specs.compressor("wrap_optimizer", compressor)
    if not arguments.is_choice(op, OPS):
        raise base.bad_argument(
            "wrap_optimizer",
            f"was given op={errors.repr_of(op)}",
            f"op is one of {', '.join(OPS)}.",
        )
    if not arguments.is_whole(accumulation_steps, 1):
        raise base.bad_argument(
            "wrap_optimizer",
            f"was given accumulation_steps={errors.repr_of(accumulation_steps)}",
            "accumulation_steps is the number of steps per update, a positive int.",
        )
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, Wrapped) or isinstance(inner, Wrapped):
        raise errors.ArgumentError(
            f"the optimizer {type(optimizer).__name__} is already wrapped; its "
            "gradients would be combined twice.",
            fix="wrap it once; of two nested optimizers, wrap the outer one.",
        )
    adapter = _adapter_for(optimizer)
    _check_variables(optimizer, world.num_replicas)
    original = type(optimizer)
    # Configs and saved files name the class and its module: those of the original.
    namespace: dict[str, Any] = {
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        "_replicator_world": world,
        "_replicator_creating": staticmethod(creating),
        "_replicator_options": (
            op,
            accumulation_steps,
            original.__name__,
            context.current() is None,
            compressor,
        ),
        "_replicator_combiners": weakref.WeakKeyDictionary(),
    }
    if adapter in (KerasAdapter, LegacyKerasAdapter):
        # Keras looks up the public names of its classes by the class object.
        namespace["__class__"] = property(lambda _: original)
    derived = type(original)(original.__name__, (adapter, original), namespace)
    wrapped = object.__new__(derived)
    object.__setattr__(wrapped, "__dict__", optimizer.__dict__)
    if accumulation_steps > 1:
        wrapped._replicator_combiner  # noqa: B018  whose sums checkpoints hold
    return wrapped


def _adapter_for(optimizer: Any) -> type[Wrapped]:
    """Returns the adapter for the optimizer's family.

    Legacy Keras is recognized by its modules: the package need not be installed, and
    `tf.keras` may be either Keras.
    """
    modules = {cls.__module__ for cls in type(optimizer).__mro__}
    if any(name.startswith("keras.src.optimizers.") for name in modules):
        return KerasAdapter
    if modules & LEGACY_KERAS:
        return LegacyKerasAdapter
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return V1Adapter
    if isinstance(optimizer, tf.Module) and callable(getattr(optimizer, "apply", None)):
        return SonnetAdapter
    raise base.bad_argument(
        "wrap_optimizer",
        f"was given {type(optimizer).__name__} {errors.repr_of(optimizer)}",
        "pass an optimizer of Keras 3, legacy Keras (tf_keras), tf.compat.v1.train "
        "or Sonnet 2; for anything else, all_reduce the gradients yourself.",
    )


def _check_variables(optimizer: Any, num_replicas: int) -> None:
    """Raises ContextError if the optimizer holds variables that are not replicated."""
    if num_replicas == 1:
        return
    if isinstance(optimizer, tf.Module):
        # Sonnet's own property raises if there are no variables yet.
        variables = tf.Module.variables.fget(optimizer)
    else:
        variables = getattr(optimizer, "variables", ())
    for variable in variables() if callable(variables) else variables:
        if not isinstance(plain(variable), SeenAsOne):
            raise errors.ContextError(
                f"the optimizer {type(optimizer).__name__} holds variable "
                f"{variable.name}, which was created outside the context and would be "
                "updated once per replica.",
                fix="create the optimizer (or load the model that holds it) under "
                "`with repl.context():`.",
            )
