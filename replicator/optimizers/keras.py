# SPDX-License-Identifier: Apache-2.0
"""The adapter for Keras 3 optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import autograph, graphs
from replicator.optimizers import checks, overrides, parts, sparsity
from replicator.optimizers.wrapped import WeighedLosses, Wrapped
from replicator.variables import unbuilt
from replicator.variables.replicated import plain
from replicator.variables.seen_as_one import SeenAsOne


class _ScaledEarly(dict[int, Any]):
    """Where losses were scaled before their optimizer was built, by its id."""


class KerasAdapter(Wrapped):
    """Adapts Keras 3 optimizers, including LossScaleOptimizer and MultiOptimizer."""

    @property
    def _replicator_takes_some(self) -> bool:
        inner = getattr(self, "inner_optimizer", self)
        return not hasattr(
            inner, "optimizers"
        )  # which may be unknown until it is built

    @autograph.not_converted
    def build(self, variables: Any) -> Any:
        """Creates slots that have a component per replica, like their variables.

        This works outside a context too: callbacks and files build before any step.
        """
        if not any(isinstance(plain(v), SeenAsOne) for v in variables):
            return super().build(variables)
        with self._replicator_creating():
            return super().build(variables)

    @autograph.not_converted
    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Combines the replicas' gradients and applies them.

        Args:
            grads: This replica's gradients; None for a variable that it did not use.
            trainable_variables: As for the Keras optimizer.
            *args: As for the optimizer, if its class takes more.
            **options: The same. `weight` is the weight of this replica's gradients in
                the mean, e.g. its number of examples; None: all replicas weigh the
                same.
        """
        base_apply = super().apply
        if overrides.has_combined_gradients(self):
            return self._replicator_apply_combined(
                base_apply, grads, trainable_variables, *args, **options
            )
        weight, args, options = overrides.weight_of(base_apply, 2, args, options)
        if trainable_variables is None:
            if not self.built:
                return base_apply(grads)  # raises, in Keras' words
            inner = getattr(self, "inner_optimizer", self)
            variables = list(inner._trainable_variables)
        else:
            variables = checks.entries(
                type(self).__name__, "variables", trainable_variables
            )
        grads = checks.entries(type(self).__name__, "gradients", grads)
        if not grads:
            return None

        def update(
            part_optimizer: Any, combined: Sequence[Any], updated: Sequence[Any]
        ) -> Any:
            apply = base_apply if part_optimizer is None else part_optimizer.apply
            return self._replicator_apply_combined(
                apply, combined, updated, *args, **options
            )

        return self._replicator_update(grads, variables, weight, update)

    @autograph.not_converted
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        """Combines the replicas' gradients and applies them; see `apply`.

        If the user's class overrides this method, it gets the combined gradients.
        """
        import keras

        base = super().apply_gradients
        if overrides.has_combined_gradients(self):
            return base(grads_and_vars, *args, **options)
        weight, args, options = overrides.weight_of(base, 1, args, options)
        grads, variables = checks.pairs(type(self).__name__, grads_and_vars)
        base_method = keras.optimizers.Optimizer.apply_gradients
        if not grads or getattr(base, "__func__", None) is base_method:
            self._replicator_apply(grads, variables, weight)
            return self.iterations
        results: list[Any] = []

        def update(_: Any, combined: Sequence[Any], updated: Sequence[Any]) -> None:
            _refuse_lost_conditions(self)
            # Also those without gradients, as on one device.
            pairs = list(zip(combined, updated, strict=True))
            results.append(base(pairs, *args, **options))

        self._replicator_update(grads, variables, weight, update)
        accumulates = self._replicator_combiner.accumulation_steps > 1
        return self.iterations if accumulates or not results else results[-1]

    def _replicator_apply(self, grads: Any, variables: Any, weight: Any) -> None:
        """Calls `apply`, which may have other parameters in the user's class."""
        self.apply(grads, variables, **({} if weight is None else {"weight": weight}))

    def _replicator_apply_combined(
        self, apply: Any, grads: Any, variables: Any, *args: Any, **options: Any
    ) -> Any:
        """Applies combined gradients; the last replica knows all that exist."""
        _refuse_lost_conditions(self)
        if variables is not None and self._replicator_takes_some:
            grads, variables = list(grads), list(variables)
            if len(grads) == len(variables):
                grads, variables = sparsity.settled(grads, variables)
        return apply(grads, variables, *args, **options)

    def _replicator_update(
        self, grads: Any, variables: Any, weight: Any, update: Callable[..., Any]
    ) -> Any:
        """Combines gradients and calls `update`, in which nothing is combined again."""

        def prepare(_: Sequence[Any]) -> None:
            if not self.built:
                _build(self, variables)

        def update_combined(*args: Any) -> Any:
            with overrides.with_combined_gradients(self):
                return update(*args)

        result = self._combined(grads, variables, weight, prepare, update_combined)
        replica = context.current()
        # Not built yet: this build is only to find which variables are used at all.
        if replica is not None and self.built:
            place = replica.build.states.of(_ScaledEarly).get(id(self))
            if place is not None:
                replica.build.knowledge[place] = True
                raise context.BuildAgain
        return result

    def _expanded(
        self, state: dict[str, Any], division: parts.Division
    ) -> dict[str, Any]:
        indices = "_trainable_variables_indices"
        return parts.expand_keyed(self, state, division, indices)

    @autograph.not_converted
    def scale_loss(self, loss: Any) -> Any:
        """Scales a loss; even in the first step, the scale is read from its variable.

        Also multiplies the loss by the replica's weight, if that is known. Gradients
        that reach other replicas, through communication in the forward pass, are then
        weighted by the replica whose loss they come from.
        """
        replica = context.current()
        if replica is not None:
            loss = self._weighed(loss, replica)
        dynamic = hasattr(self, "dynamic_growth_steps")
        if replica is not None and dynamic and not self.built:
            # Keras would scale by a Python constant for the lifetime of the trace. Let
            # `apply` create the variables first, and build the step again.
            place = ("scale_loss", replica.count("scale_loss"))
            if place in replica.build.knowledge:
                raise errors.ContextError(
                    f"{type(self).__name__} is created again each time the step is "
                    "built: its scale is not known when the loss is scaled.",
                    fix="create it outside step_fn, under `with repl.context():`.",
                )
            replica.build.states.of(_ScaledEarly)[id(self)] = place
        return super().scale_loss(loss)

    def _replicator_scale(self) -> tf.Tensor | None:
        """Returns the loss scale; LossScaleOptimizer divides what is reduced by it."""
        scale = getattr(self, "dynamic_scale", None)
        return None if scale is None else tf.convert_to_tensor(scale)

    def _weighed(self, loss: Any, replica: context.ReplicaContext) -> Any:
        """Weights a loss so that all replicas' gradients weigh the same afterwards."""
        combiner = self._replicator_combiner
        # Sums over several steps already skip what is not finite in an empty shard.
        if replica.share is None or combiner.op != "mean":
            return loss
        if combiner.accumulation_steps > 1:
            return loss
        replica.states.of(WeighedLosses).add(id(self))
        loss = tf.convert_to_tensor(loss)
        return loss * tf.cast(replica.share * replica.num_replicas, loss.dtype)


def _build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates an optimizer's variables; if that fails, the optimizer is not built.

    Keras marks an optimizer as built before all of it is.
    """
    import keras  # tf.keras is another package where it is tf_keras

    shared_in_graph = context.current() is None and not tf.executing_eagerly()
    graph = tf.compat.v1.get_default_graph()
    start = graphs.operation_count(graph) if shared_in_graph else 0
    try:
        with keras.name_scope(optimizer.name):
            optimizer.build(variables)
        if shared_in_graph:
            new_ops = graph.get_operations()[start:]
            unbuilt.refuse_graph_writes(type(optimizer).__name__, new_ops)
    except BaseException:
        optimizer.built = getattr(optimizer, "inner_optimizer", optimizer).built = False
        raise


def _refuse_lost_conditions(optimizer: Any) -> None:
    """Raises if Keras' conditions would be lost in the tf.Graph being built.

    Keras 3 evaluates `tensor == 0` for what happens in some steps only. In a tf.Graph
    that compares Python objects and is always False: the update would never happen.
    """
    replica = context.current()
    if replica is None or replica.build.graph.building_function:
        return
    options = ("gradient_accumulation_steps", "ema_overwrite_frequency")
    for inner, option in itertools.product(_innermost(optimizer), options):
        if getattr(inner, option, None):
            raise errors.ArgumentError(
                f"Keras' own {option} (of {type(inner).__name__}) has no effect in a "
                "tf.Graph.",
                fix="run the step eagerly or in a tf.function; to accumulate "
                "gradients, repl.wrap_optimizer(optimizer, accumulation_steps=...) "
                "works everywhere.",
            )


def _innermost(optimizer: Any) -> list[Any]:
    """Returns the optimizers that update variables: several in a MultiOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [inner, *getattr(inner, "optimizers", ())]
