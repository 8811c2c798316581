# SPDX-License-Identifier: Apache-2.0
"""The adapter for optimizers of legacy Keras, the package tf_keras.

There are two kinds: subclasses of `tf_keras.optimizers.Optimizer`, and the older ones
of `tf_keras.optimizers.legacy.Optimizer`. Each has its own LossScaleOptimizer. Both ask
tf.distribute to sum gradients over its replicas, which leaves gradients that are
already combined unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator._tf import autograph
from replicator.optimizers import checks, overrides, parts, sparsity
from replicator.optimizers.wrapped import LaterSlots

# The modules that define the base classes of the two kinds.
LEGACY_KERAS = {
    "tf_keras.src.optimizers.optimizer",
    "tf_keras.src.optimizers.legacy.optimizer_v2",
}


class LegacyKerasAdapter(LaterSlots):
    """Adapts legacy Keras optimizers, including LossScaleOptimizer."""

    @autograph.not_converted
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        """Combines the replicas' gradients and applies them.

        Args:
            grads_and_vars: Pairs of this replica's gradient and its variable; the
                gradient is None for a variable that it did not use.
            *args: As for the optimizer: the kinds differ in what comes next.
            **options: The same. `weight` is the weight of this replica's gradients in
                the mean, e.g. its number of examples; None: all replicas weigh the
                same.

        Returns:
            What the optimizer itself returns.
        """
        who = type(self).__name__
        base_apply = super().apply_gradients
        weight, args, options = overrides.weight_of(base_apply, 1, args, options)
        arguments = overrides.arguments_by_name(base_apply, 1, args, options)
        name = arguments.get("name")
        grads, variables = checks.pairs(who, grads_and_vars)
        if context.current() is not None:
            checks.refuse_combined(who, arguments)
            if not grads:
                return self.iterations
        inner = getattr(self, "inner_optimizer", self)

        def prepare(used: Sequence[Any]) -> None:
            with tf.name_scope(name or _scope_of(inner)), tf.init_scope():
                _create_variables(inner, variables, used)

        def update(
            part_optimizer: Any, combined: Sequence[Any], updated: Sequence[Any]
        ) -> Any:
            _set_back(inner if part_optimizer is None else part_optimizer)
            pairs = list(zip(*sparsity.settled(combined, updated), strict=True))
            if part_optimizer is None:
                in_step = context.current() is not None
                with contextlib.nullcontext() if in_step else _uncompiled(inner):
                    return base_apply(pairs, *args, **options)
            result = part_optimizer.apply_gradients(pairs, *args, **options)
            vars(inner).update(_python_state(part_optimizer))
            return result

        return self._combined(grads, variables, weight, prepare, update)

    def _expanded(
        self, state: dict[str, Any], division: parts.Division
    ) -> dict[str, Any]:
        if hasattr(self, "_index_dict"):
            return parts.expand_keyed(self, state, division, "_index_dict")
        return parts.expand_slots(self, state, division)


@contextlib.contextmanager
def _uncompiled(optimizer: Any) -> Iterator[None]:
    """Lets an optimizer update in this block without XLA, which knows one device.

    tf_keras compiles updates by default where there are GPUs.
    """
    compiles = getattr(optimizer, "jit_compile", False)
    if compiles:
        optimizer.jit_compile = False
    try:
        yield
    finally:
        if compiles:
            optimizer.jit_compile = True


def _scope_of(optimizer: Any) -> str:
    """Returns the name scope in which an optimizer creates its variables."""
    return str(getattr(optimizer, "name", None) or optimizer._name)


def _create_variables(
    optimizer: Any, variables: Sequence[Any], used: Sequence[Any]
) -> None:
    """Creates those of an optimizer's variables that do not exist yet.

    Args:
        optimizer: An optimizer of either kind; not a LossScaleOptimizer.
        variables: The variables that it gets gradients, or None, for.
        used: Those of the variables that are used on any replica.
    """
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:
        optimizer._create_all_weights(used)


_STATES = "Python state of optimizers at first"  # key in Build.knowledge


def _set_back(optimizer: Any) -> None:
    """Resets an optimizer's Python state to what the first such call started with.

    Nadam counts its calls in a Python int and compares that in the graph, so that each
    replica would update differently, and so would a step whose build starts over.
    """
    replica = context.current()
    if replica is None:
        return
    place = ("python state", type(optimizer), replica.count("python state"))
    state = _python_state(optimizer)
    states = replica.build.knowledge.setdefault(_STATES, {})
    vars(optimizer).update(states.setdefault(place, state))


def _python_state(optimizer: Any) -> dict[str, Any]:
    """Returns the attributes that an optimizer keeps as Python numbers."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, (bool, int, float))
    }
