"""wrap_optimizer: gradients are combined over the replicas before they are applied.

An optimizer is wrapped by giving its state a second object, of a class made on the spot
that derives from the optimizer's own: it passes for the original in isinstance, config
and checkpoints, and only `apply` differs. One adapter per family says which method that
is and how the family creates its slots; what is common is in `gradients.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors, gradients
from replicator.variables import ReplicatedVariable, plain

OPS = ("mean", "sum")
_do_not_convert = tf.autograph.experimental.do_not_convert


class _Wrapped:
    """What wrapped optimizers of all families have in common.

    Attributes:
        _replicator_options: What to make a Combiner of.
        _replicator_combiners: The Combiner of each instance. There is more than one
            instance where the class makes another one, by `from_config`, say.
    """

    _replicator_options: tuple[str, int, str, bool]
    _replicator_combiners: weakref.WeakKeyDictionary[Any, gradients.Combiner]

    @property
    def _replicator_combiner(self) -> gradients.Combiner:
        if self not in self._replicator_combiners:
            made = gradients.Combiner(*self._replicator_options)
            self._replicator_combiners[self] = made
        return self._replicator_combiners[self]

    def _combined(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        weight: Any,
        prepare: Callable[[Sequence[Any]], Any],
        apply: Callable[[Sequence[Any]], Any],
    ) -> Any:
        """Combines gradients and applies them; outside a step, just applies them.

        Args:
            grads: One tensor, IndexedSlices or None per variable.
            variables: What they are gradients of.
            weight: What this replica's gradients weigh in the mean.
            prepare: Creates the optimizer's slots, if that has not been done; given the
                variables that are used on any replica.
            apply: Updates by gradients that are equal on all replicas.
        """
        replica = context.current()
        if replica is None:
            if weight is not None or self._replicator_combiner.accumulation_steps > 1:
                context.require("a weighted or accumulating update")
            return apply(grads)
        return self._replicator_combiner.apply(
            replica, grads, variables, weight, prepare, apply
        )


class _KerasMixin(_Wrapped):
    """Keras 3 optimizers, LossScaleOptimizer included."""

    @_do_not_convert
    def apply(
        self, grads: Sequence[Any], trainable_variables: Any = None, weight: Any = None
    ) -> Any:
        """Combines the replicas' gradients and applies them.

        Args:
            grads: This replica's gradients; None for a variable that it did not use.
            trainable_variables: As for the Keras optimizer.
            weight: What this replica's gradients weigh in the mean, e.g. its number of
                examples; all replicas weigh alike if it is None.
        """
        base_apply = super().apply
        if trainable_variables is None:
            if not self.built:
                return base_apply(grads)  # raises, in Keras' words
            inner = getattr(self, "inner_optimizer", self)
            variables = list(inner._trainable_variables)
        else:
            variables = list(trainable_variables)
        grads = list(grads)
        if not grads:
            return None
        _refuse_lost_conditions(self)
        if len(grads) != len(variables):
            raise errors.ArgumentError(
                errors.compose(
                    f"{type(self).__name__} was given {len(grads)} gradients for "
                    f"{len(variables)} variables.",
                    [f"at {errors.user_line()}"],
                    "hand in one gradient per variable; None where there is none.",
                )
            )

        def prepare(_: Sequence[Any]) -> None:
            if not self.built:
                with tf.keras.name_scope(self.name):
                    self.build(variables)

        result = self._combined(
            grads, variables, weight, prepare, lambda g: base_apply(g, variables)
        )
        replica = context.current()
        early = ("scaled early", id(self))
        if replica is not None and early in replica.build.findings:
            replica.build.knowledge[replica.build.findings[early]] = True
            raise context.BuildAgain
        return result

    @_do_not_convert
    def apply_gradients(self, grads_and_vars: Any, weight: Any = None) -> Any:
        """Combines the replicas' gradients and applies them; see `apply`."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables, weight=weight)
        return self.iterations

    @_do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Scales a loss, in the first step too by the variable with the scale."""
        replica = context.current()
        dynamic = hasattr(self, "dynamic_growth_steps")
        if replica is not None and dynamic and not self.built:
            # Keras would scale by a Python constant, for as long as the traced step
            # lives. Let `apply` create the variables, and then build the step again.
            place = ("scale_loss", replica.count("scale_loss"))
            if place in replica.build.knowledge:
                raise errors.ContextError(
                    errors.compose(
                        f"{type(self).__name__} is made anew each time the step is "
                        "built: its scale is not known when the loss is scaled.",
                        [f"at {errors.user_line()}"],
                        "create it outside of step_fn, under `with repl.context():`.",
                    )
                )
            replica.build.findings["scaled early", id(self)] = place
        return super().scale_loss(loss)


def _refuse_lost_conditions(optimizer: Any) -> None:
    """Raises if a tf.Graph is being built, and Keras' conditions are lost in one.

    Keras 3 asks `tensor == 0` for what happens in some steps only. In a tf.Graph that
    compares Python objects and is always False: the update would never happen.
    """
    replica = context.current()
    if replica is None or replica.build.graph.building_function:
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for option in ("gradient_accumulation_steps", "ema_overwrite_frequency"):
        if getattr(inner, option, None):
            raise errors.ArgumentError(
                errors.compose(
                    f"Keras' own {option} (of {type(inner).__name__}) has no effect in "
                    "a tf.Graph.",
                    [f"at {errors.user_line()}"],
                    "run the step eagerly or in a tf.function; to accumulate "
                    "gradients, repl.wrap_optimizer(optimizer, accumulation_steps=...) "
                    "works everywhere.",
                )
            )


class _V1Mixin(_Wrapped):
    """Optimizers of tf.compat.v1.train."""

    @_do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: Any = None,
        name: str | None = None,
        weight: Any = None,
    ) -> Any:
        """Combines the replicas' gradients and applies them.

        Args:
            grads_and_vars: Pairs of this replica's gradient and its variable.
            global_step: Incremented once per step, if given.
            name: Of the returned op.
            weight: What this replica's gradients weigh in the mean.

        Returns:
            The op that updates this replica's components.
        """
        grads_and_vars = list(grads_and_vars)
        grads = [gradient for gradient, _ in grads_and_vars]
        variables = [variable for _, variable in grads_and_vars]
        base_apply = super().apply_gradients

        def prepare(used: Sequence[Any]) -> None:
            with tf.init_scope():
                self._create_slots(used)

        def apply(combined: Sequence[Any]) -> Any:
            pairs = list(zip(combined, variables, strict=True))
            if global_step is None:
                return base_apply(pairs, name=name)
            # TensorFlow would count by the type of the variable, and keep what it gets
            # of any other than its own in a collection that compares by value.
            with tf.control_dependencies([base_apply(pairs)]):
                return global_step.assign_add(1, name=name, read_value=False)

        return self._combined(grads, variables, weight, prepare, apply)


class _SonnetMixin(_Wrapped):
    """Sonnet 2 optimizers: anything with apply(updates, parameters)."""

    @_do_not_convert
    def apply(
        self, updates: Sequence[Any], parameters: Sequence[Any], weight: Any = None
    ) -> Any:
        """Combines the replicas' updates and applies them.

        Args:
            updates: This replica's gradients; None for a parameter it did not use.
            parameters: The variables, in the same order.
            weight: What this replica's gradients weigh in the mean.
        """
        base_apply = super().apply

        def prepare(_: Sequence[Any]) -> None:
            initialize = getattr(self, "_initialize", None)
            if initialize is not None:
                initialize(parameters)

        return self._combined(
            updates, parameters, weight, prepare, lambda g: base_apply(g, parameters)
        )


def wrap_optimizer(
    optimizer: Any, num_replicas: int, op: str = "mean", accumulation_steps: int = 1
) -> Any:
    """Returns an optimizer that combines gradients; see Replicator.wrap_optimizer."""
    if op not in OPS:
        raise errors.ArgumentError(
            f"wrap_optimizer was given op={op!r}. Fix: op is one of {', '.join(OPS)}."
        )
    whole = isinstance(accumulation_steps, int) and not isinstance(
        accumulation_steps, bool
    )
    if not whole or accumulation_steps < 1:
        raise errors.ArgumentError(
            f"wrap_optimizer was given accumulation_steps={accumulation_steps!r}. "
            "Fix: it is the number of steps per update, a positive int."
        )
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(optimizer, _Wrapped) or isinstance(inner, _Wrapped):
        raise errors.ArgumentError(
            f"the optimizer {type(optimizer).__name__} is wrapped already; its "
            "gradients would be combined twice. Fix: wrap it once; of two nested "
            "optimizers, the outer."
        )
    mixin = _mixin_for(optimizer)
    _check_variables(optimizer, num_replicas)
    original = type(optimizer)
    # The name and module of the original: that is what configs and saved files say.
    namespace: dict[str, Any] = {
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        "_replicator_options": (
            op,
            accumulation_steps,
            original.__name__,
            context.current() is None,
        ),
        "_replicator_combiners": weakref.WeakKeyDictionary(),
    }
    if mixin is _KerasMixin:
        # Keras knows the public names of its classes by the class itself.
        namespace["__class__"] = property(lambda _: original)
    derived = type(original)(original.__name__, (mixin, original), namespace)
    wrapped = object.__new__(derived)
    object.__setattr__(wrapped, "__dict__", optimizer.__dict__)
    return wrapped


def _mixin_for(optimizer: Any) -> type[_Wrapped]:
    """Returns the adapter for the optimizer's family."""
    if isinstance(optimizer, tf.keras.optimizers.Optimizer):
        return _KerasMixin
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _V1Mixin
    if isinstance(optimizer, tf.Module) and callable(getattr(optimizer, "apply", None)):
        return _SonnetMixin
    raise errors.ArgumentError(
        f"wrap_optimizer was given {type(optimizer).__name__}. Fix: hand in an "
        "optimizer of Keras 3, tf.compat.v1.train or Sonnet 2; for anything else, "
        "all_reduce the gradients yourself."
    )


def _check_variables(optimizer: Any, num_replicas: int) -> None:
    """Raises ContextError if the optimizer holds variables that are not replicated."""
    if num_replicas == 1:
        return
    if isinstance(optimizer, tf.Module):
        # Sonnet's own property raises if there are none yet.
        variables = tf.Module.variables.fget(optimizer)
    else:
        variables = getattr(optimizer, "variables", ())
    for variable in variables() if callable(variables) else variables:
        if not isinstance(plain(variable), ReplicatedVariable):
            raise errors.ContextError(
                errors.compose(
                    f"the optimizer {type(optimizer).__name__} holds variable "
                    f"{variable.name}, which was made outside of the context and would "
                    "be updated once per replica.",
                    [f"at {errors.user_line()}"],
                    "create the optimizer (or load the model that holds it) under "
                    "`with repl.context():`.",
                )
            )
