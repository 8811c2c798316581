# SPDX-License-Identifier: Apache-2.0
"""Base classes of the wrapped optimizers of all families.

A family's adapter derives from Wrapped and precedes the optimizer's own class in the
MRO. It overrides the method that applies gradients and says how the family creates its
slots; gradients.py combines the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import state as tf_state
from replicator.optimizers import checks, gradients, parts
from replicator.primitives import all_reduce, by_hand, weighing
from replicator.variables import single_device
from replicator.variables.replicated import plain
from replicator.world import World


class WeighedLosses(set[int]):
    """The ids of optimizers whose loss is already multiplied by the replica's weight.

    They leave when they apply its gradients.
    """


class Wrapped:
    """Base class of the adapters: combines gradients before they are applied.

    Attributes:
        _replicator_world: The replicas whose gradients are combined.
        _replicator_creating: Returns a block in which new variables are replicated.
        _replicator_options: The arguments of each Combiner.
        _replicator_combiners: The Combiner of each instance. A class has more than one
            instance if it creates others itself, by `from_config`, say.
    """

    _replicator_world: World
    _replicator_creating: Callable[[], Any]
    _replicator_options: tuple[Any, ...]
    _replicator_combiners: weakref.WeakKeyDictionary[Any, gradients.Combiner]

    @property
    def _replicator_takes_some(self) -> bool:
        """Whether it can be applied to a part of its variables.

        A MultiOptimizer cannot, nor can one of its optimizers go without gradients.
        """
        return True

    @property
    def _replicator_combiner(self) -> gradients.Combiner:
        if self not in self._replicator_combiners:
            combiner = gradients.Combiner(*self._replicator_options)
            self._replicator_combiners[self] = combiner
            if combiner.accumulation_steps > 1:
                tf_state.track(self, "replicator_sums", combiner.sums)
        return self._replicator_combiners[self]

    def _combined(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        weight: Any,
        prepare: Callable[[Sequence[Any]], Any],
        apply: Callable[[Any, Sequence[Any], Sequence[Any]], Any],
    ) -> Any:
        """Combines gradients and applies them; outside a step, just applies them.

        In a program for one device, they are those of the whole batch.

        Args:
            grads: One tensor, IndexedSlices or None per variable.
            variables: The variables that they are gradients of.
            weight: The weight of this replica's gradients in the mean.
            prepare: Creates the optimizer's slots unless they exist, given the
                variables that are used on any replica.
            apply: Updates variables by gradients that are equal on all replicas, given
                the stand-in that does so (None: this optimizer), gradients, variables.
        """
        replica, combiner = context.current(), self._replicator_combiner
        name = type(self).__name__
        checks.check_counts(name, grads, variables)
        view = single_device.view()
        if view is not None:
            view.note_compression(map(plain, variables), combiner.compression)
            self._track_compression(variables)
            division = parts.Division.undivided(variables)
        else:
            division = parts.Division.of(self, variables)

        def update(pieces: Sequence[Any]) -> Any:
            pieces = parts.clipped(self, division, pieces)
            return apply(
                parts.optimizer_of_parts(self, division), pieces, division.variables
            )

        if replica is None:
            accumulates = combiner.accumulation_steps > 1 and weight is None
            if accumulates and (combiner.accumulates_outside or view is not None):
                return combiner.apply_outside(
                    grads,
                    variables,
                    prepare,
                    lambda combined: update(division.cut_all(combined)),
                )
            if weight is not None or combiner.accumulation_steps > 1:
                context.require("a weighted or accumulating update")
            if division.divides:
                prepare(variables)
            return update(division.cut_all(grads))
        self._refuse_elsewhere(replica)
        checks.check(name, grads, variables)
        grads, weight = self._weighed_grads(replica, grads, weight)
        self._track_compression(division.variables)
        return combiner.apply(
            replica,
            grads,
            variables,
            weight,
            prepare,
            update,
            division,
            self._replicator_scale,
            self._replicator_takes_some,
        )

    def _weighed_grads(
        self, replica: context.ReplicaContext, grads: Sequence[Any], weight: Any
    ) -> tuple[Sequence[Any], Any]:
        """Returns a replica's gradients and their weight in the mean, or None.

        Args:
            replica: The replica being built.
            grads: Its gradients.
            weight: The weight that the user gave them, if any.
        """
        name, combiner = type(self).__name__, self._replicator_combiner
        how, by_examples = f'op="{combiner.op}"', False
        if weight is not None:
            weight = all_reduce.as_weight(name, weight)
            by_examples = by_hand.is_by_examples(replica, weight)
            how += ", with its own weight"
            if not by_examples and weighing.communicated(replica, grads):
                members = range(replica.num_replicas)
                grads = by_hand.if_equal(replica, grads, weight, members, name)
        elif id(self) in (weighed := replica.states.of(WeighedLosses)):
            weighed.remove(id(self))
            how += ", whose loss is weighted"
        elif combiner.op == "mean":
            by_examples = True
            single_step = combiner.accumulation_steps == 1
            # When accumulating, each of the steps weighs the same.
            weight = replica.examples if single_step else replica.share
        grads = weighing.claim(replica, grads, by_examples, f"{name} ({how})")
        return grads, weight

    def _expanded(
        self, state: dict[str, Any], division: parts.Division
    ) -> dict[str, Any]:
        """Expands those attributes that belong to variables updated part by part.

        Args:
            state: The optimizer's attributes.
            division: The pieces to update.
        """
        raise NotImplementedError

    def _track_compression(self, variables: Sequence[Any]) -> None:
        """Adds the compressors' memory to checkpoints, once there are compressors.

        Not earlier: checkpoints saved without compressors would be found to lack
        whatever is tracked.
        """
        compression = self._replicator_combiner.compression
        if not compression.is_tracked and compression.is_asked_for(variables):
            compression.is_tracked = True
            with tf.init_scope(), context.building(None):
                tf_state.track(self, "replicator_compression", compression.memory)

    def _replicator_scale(self) -> tf.Tensor | None:
        """Returns the loss scale that gradients are multiplied by, or None."""
        return None

    def _refuse_elsewhere(self, replica: context.ReplicaContext) -> None:
        """Raises ContextError if the step runs on other replicas than the optimizer's.

        As with variables, another Replicator on the same devices may run it.
        """
        if replica.build.world == self._replicator_world:
            return
        raise errors.ContextError(
            f"{type(self).__name__} was wrapped by the Replicator on "
            f"{list(self._replicator_world.devices)}, but applied on replica "
            f"{replica.replica_id} in a step of another Replicator, on "
            f"{list(replica.build.world.devices)}.",
            fix="wrap it with wrap_optimizer of the Replicator that runs the step.",
        )


class LaterSlots(Wrapped):
    """For families that create a slot as soon as a checkpoint holds its value.

    That would happen wherever the checkpoint is restored, perhaps outside the context,
    and give a plain variable that all replicas write. The families defer it inside a
    scope that creates variables, so the first step creates and restores the slot.
    """

    def _create_or_restore_slot_variable(self, *args: Any, **kwargs: Any) -> Any:
        with tf.variable_creator_scope(lambda create, **facts: create(**facts)):
            return super()._create_or_restore_slot_variable(*args, **kwargs)
