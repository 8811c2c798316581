# SPDX-License-Identifier: Apache-2.0
"""Makes replicas agree on which gradients exist, dense or sparse, and converts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.optimizers.accumulators import Gradient
from replicator.variables.replicated import plain


@dataclasses.dataclass(frozen=True)
class GradientLayout:
    """Whether a gradient is sparse, and the dtype of its indices if so."""

    index_dtype: str | None = None

    @classmethod
    def of(cls, gradient: Gradient | None) -> GradientLayout | None:
        """Returns the layout of a gradient; None if there is no gradient."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return cls(gradient.indices.dtype.name)
        return cls()


def merge_all(
    layouts: Sequence[GradientLayout | None],
    other_layouts: Sequence[GradientLayout | None],
) -> tuple[GradientLayout | None, ...]:
    """Returns the layouts to which the gradients of both replicas can be converted."""
    return tuple(
        _merge(one, two) for one, two in zip(layouts, other_layouts, strict=True)
    )


def _merge(
    one: GradientLayout | None, two: GradientLayout | None
) -> GradientLayout | None:
    if one is None or two is None:
        return one or two
    return one if one == two else GradientLayout()


def as_layout(
    gradient: Gradient | None, variable: Any, layout: GradientLayout | None
) -> Gradient | None:
    """Makes a gradient dense or sparse; None becomes zeros, unless all have None."""
    if layout is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        if GradientLayout.of(gradient) == layout:
            return gradient
        if gradient.dense_shape is None:
            gradient = tf.IndexedSlices(
                gradient.values, gradient.indices, _shape_of(plain(variable))
            )
    if gradient is not None:
        return _of_shape(tf.convert_to_tensor(gradient), variable.shape)
    value = plain(variable)
    if layout.index_dtype is None:
        return tf.zeros_like(value)
    shape = _shape_of(value)
    return tf.IndexedSlices(
        tf.zeros(tf.concat([[0], shape[1:]], 0), value.dtype),
        tf.zeros([0], layout.index_dtype),
        shape,
    )


def _of_shape(gradient: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """Returns a gradient with its variable's static shape, which it may lack."""
    if gradient.shape.is_fully_defined() or not shape.is_fully_defined():
        return gradient
    return tf.ensure_shape(gradient, shape)


def _shape_of(variable: Any) -> tf.Tensor:
    """Returns a variable's shape, and reads it only if it may change."""
    if variable.shape.is_fully_defined():
        return tf.constant(variable.shape.as_list(), tf.int32)
    return tf.shape(variable)


def agree(
    replica: context.ReplicaContext,
    grads: Sequence[Gradient | None],
    variables: Sequence[Any],
    weighted: bool,
    name: str,
    may_guess: bool,
) -> Sequence[GradientLayout | None] | None:
    """Returns the layouts of the gradients that any replica has.

    A variable that is unused on some replicas counts as zeros there, and one that is
    unused on all is not updated; one replica cannot tell which. Replica 0's gradients
    are taken as typical; if a later replica has others, the step is built again with
    that knowledge. The n-th calls of the replicas belong together, whichever objects
    they are called on: an optimizer created inside step_fn is a different object on
    each replica.

    Args:
        replica: The replica being built.
        grads: This replica's gradients.
        variables: The variables that they are gradients of.
        weighted: Whether the gradients have a weight in the mean.
        name: The optimizer's name.
        may_guess: Whether the update of variables that replica 0 uses may be built
            before it is known whether another one uses more.

    Returns:
        The layout of each gradient, None for variables that no replica uses. None
        instead of the list if no update is to be built yet, because the step will be
        built again.
    """
    place = ("gradients", replica.count("gradients"))
    call = _OptimizerCall.by(replica, name, grads, variables, weighted)
    build = replica.build
    first_calls, merged_calls = (
        build.states.of(_FirstCalls),
        build.states.of(_MergedLayouts),
    )
    first = first_calls.setdefault(place, call)
    first.check_pairs_with(call)
    if not build.all_traced and build.world.num_local == replica.num_replicas:
        return first.layouts  # all others are copies
    known_layouts = build.knowledge.get(place)
    # Guessing which variables replica 0 does not use would do harm in three cases:
    # optimizers raise if they get no gradients at all, slots created inside step_fn are
    # told apart by the order of their creation, and some take all variables or none.
    used = [layout is not None for layout in first.layouts]
    guess = any(used) if may_guess else all(used)
    if known_layouts is None and not guess and replica.num_replicas > 1:
        so_far = merged_calls.get(place, first.layouts)
        merged = merge_all(so_far, call.layouts)
        merged_calls[place] = merged
        if replica.replica_id != build.traced[-1]:
            return None
    else:
        layouts = first.layouts if known_layouts is None else known_layouts
        merged = merge_all(layouts, call.layouts)
        if merged == layouts:
            return layouts
    build.knowledge[place] = merged
    raise context.BuildAgain


def settled(
    grads: Sequence[Gradient | None], variables: Sequence[Any]
) -> tuple[list[Gradient | None], list[Any]]:
    """Returns the gradients and variables for an optimizer that warns.

    Keras warns of variables without gradients, and replica 0 may be in a build that is
    only to find that another replica has them. The last replica knows what all have: it
    alone passes variables without gradients; the others omit them.

    Args:
        grads: One per variable, None if no replica is known to use it so far.
        variables: The variables that they are gradients of.
    """
    replica = context.current()
    if replica is None or replica.replica_id == replica.build.traced[-1]:
        return list(grads), list(variables)
    used = [k for k, gradient in enumerate(grads) if gradient is not None]
    return [grads[k] for k in used], [variables[k] for k in used]


def key_of(variable: Any) -> Any:
    """Returns a key that identifies a variable of Keras or TensorFlow."""
    inner = plain(variable)
    return inner.ref() if isinstance(inner, tf.Variable) else id(inner)


@dataclasses.dataclass(frozen=True)
class _OptimizerCall:
    """The arguments of a replica's n-th call of a wrapped optimizer.

    Attributes:
        optimizer: The name of the optimizer's class.
        variables: The keys of the variables.
        layouts: The layouts of the gradients; None where there was no gradient.
        weighted: Whether a weight was given.
        site: A description of the call, with the user's line.
    """

    optimizer: str
    variables: tuple[Any, ...]
    layouts: tuple[GradientLayout | None, ...]
    weighted: bool
    site: str

    @classmethod
    def by(
        cls,
        replica: context.ReplicaContext,
        optimizer: str,
        grads: Sequence[Gradient | None],
        variables: Sequence[Any],
        weighted: bool,
    ) -> _OptimizerCall:
        """Records what the replica being built passes."""
        names = [getattr(variable, "name", "?") for variable in variables]
        text = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        return cls(
            optimizer,
            tuple(map(key_of, variables)),
            tuple(map(GradientLayout.of, grads)),
            weighted,
            f"replica {replica.replica_id} ({replica.device}): {optimizer}, "
            f"{len(names)} gradients, of {text}, "
            f"{'with a' if weighted else 'without'} weight, at {errors.user_line()}",
        )

    def check_pairs_with(self, other: _OptimizerCall) -> None:
        """Raises MismatchError unless two replicas' calls belong together."""
        sites = [self.site, other.site]
        if (self.optimizer, self.variables) != (other.optimizer, other.variables):
            raise errors.MismatchError(
                "the replicas apply gradients of different variables, or in a "
                "different order.",
                sites,
                "pass the same variables in the same order on every replica; the "
                "gradient of a variable that a replica does not use is None.",
            )
        if self.weighted != other.weighted:
            raise errors.MismatchError(
                "the replicas apply gradients with a weight and without one.",
                sites,
                "pass a weight on every replica, or on none.",
            )


class _FirstCalls(dict[Any, _OptimizerCall]):
    """What the first replica passed, by the number of the call."""


class _MergedLayouts(dict[Any, Sequence[GradientLayout | None]]):
    """The layouts of the gradients that replicas have passed so far."""
