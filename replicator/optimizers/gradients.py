# SPDX-License-Identifier: Apache-2.0
"""Combines the gradients of all replicas into one gradient per variable.

Used by the wrapped optimizers of all families. Three things make this more than an
all_reduce: a variable may be unused on some replicas, gradients may be sparse, and an
update may combine the gradients of several steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import distribute
from replicator.compressors.base import Compressor
from replicator.graph.ir import shapes
from replicator.graph.ir.placeholder import NO_POLICY, OperandPolicy
from replicator.graph.order import effects
from replicator.optimizers import accumulators, sparsity
from replicator.optimizers.accumulators import Accumulators, AccumulatorStore, Gradient
from replicator.optimizers.compression import Compression, Reducer
from replicator.optimizers.parts import Division
from replicator.optimizers.sparsity import GradientLayout
from replicator.primitives import all_gather, all_reduce, sparse
from replicator.variables import copies
from replicator.variables.chooser import SparseGradients
from replicator.variables.replicated import plain


class Combiner:
    """Combines gradients over replicas and steps, for one optimizer.

    Args:
        op: "mean" or "sum", over the replicas.
        accumulation_steps: The number of steps per update, which applies their mean.
        name: The optimizer's name, for the names of variables.
        shared: Whether all replicas use one optimizer; otherwise step_fn creates a
            separate one on each replica.
        compressor: Compresses gradients whose synchronizers name no compressor, if any.

    Attributes:
        name: The optimizer's name.
        compression: The gradients' compressors, and what they remember.
        sums: The accumulated gradients, for checkpoints.
        accumulators: The same sums, by the graph and the gradients that they belong to.
        accumulates_outside: Whether gradients of whole batches are accumulated outside
            steps.
    """

    def __init__(
        self,
        op: str,
        accumulation_steps: int,
        name: str,
        shared: bool,
        compressor: Compressor | None = None,
    ) -> None:
        self.op = op
        self.accumulation_steps = accumulation_steps
        self.name = name
        self._shared = shared
        self.compression = Compression(compressor, name)
        self.sums = AccumulatorStore()
        self.accumulates_outside = False
        self.accumulators: dict[Any, Accumulators] = {}

    def apply(
        self,
        replica: context.ReplicaContext,
        grads: Sequence[Gradient | None],
        variables: Sequence[Any],
        weight: Any,
        prepare: Callable[[Sequence[Any]], Any],
        apply: Callable[[Sequence[Any]], Any],
        division: Division,
        scale: Callable[[], tf.Tensor | None] = lambda: None,
        takes_some: bool = True,
    ) -> Any:
        """Combines gradients and applies them, in the step of one replica.

        Args:
            replica: The replica being built.
            grads: This replica's gradients.
            variables: The variables that they are gradients of.
            weight: This replica's weight in the mean over the replicas, or None.
            prepare: Creates those of the optimizer's variables that do not exist yet,
                given the variables that are used on any replica.
            apply: Updates by gradients that are equal on all replicas, one for each
                piece of the division.
            division: The parts of variables that are updated part by part.
            scale: Returns the loss scale, by which the gradients are multiplied, or
                None; called once the optimizer's variables exist.
            takes_some: Whether `apply` may be called for a part of the variables, in a
                build that is only to find that another replica uses the others.

        Returns:
            What `apply` returns; with accumulation, the op that completes the step.
        """
        self._refuse_weight(replica, weight)
        may_guess = self._shared and takes_some
        layouts = sparsity.agree(
            replica, grads, variables, weight is not None, self.name, may_guess
        )
        if layouts is None:
            return tf.no_op()
        _note_sparse(replica, variables, layouts)
        triples = zip(grads, variables, layouts, strict=True)
        grads = [sparsity.as_layout(*triple) for triple in triples]
        used = [k for k, gradient in enumerate(grads) if gradient is not None]
        used_grads = [grads[k] for k in used]
        cut = functools.partial(division.cut_some, used)
        update = functools.partial(self._update, replica, division, used, apply)
        if used_grads:
            self._prepare(replica, prepare, [variables[k] for k in used])
        signature = tuple((sparsity.key_of(variables[k]), layouts[k]) for k in used)
        reduce = self._reducer(
            replica, division, used, cut(used_grads), signature, scale
        )
        if self.accumulation_steps > 1 and used_grads:
            return self._accumulate(
                replica, used_grads, signature, weight, reduce, update, cut
            )
        return update(reduce(cut(used_grads), self.op, weight))

    def _refuse_weight(self, replica: context.ReplicaContext, weight: Any) -> None:
        """Raises ArgumentError if a weight is given and no mean is taken."""
        if weight is not None and self.op != "mean":
            raise errors.ArgumentError(
                f"{self.name} was given a weight on replica {replica.replica_id}, "
                f'but was wrapped with op="{self.op}".',
                fix='weights go with op="mean".',
            )

    def _prepare(
        self,
        replica: context.ReplicaContext,
        prepare: Callable[[Sequence[Any]], Any],
        variables: Sequence[Any],
    ) -> None:
        """Creates those of the optimizer's variables that do not exist yet."""
        if self._shared:
            # Outside the function being traced: some optimizers assign to variables
            # that they create, which must happen once and not in every step.
            with replica.creating_for_all(), tf.init_scope():
                prepare(variables)
        else:
            with replica.equal_updates(self.name):
                prepare(variables)

    def _update(
        self,
        replica: context.ReplicaContext,
        division: Division,
        used: Sequence[int],
        apply: Callable[[Sequence[Any]], Any],
        combined: Sequence[Gradient],
    ) -> Any:
        """Applies combined gradients to the pieces of the variables that are used.

        Args:
            replica: The replica being built.
            division: The pieces of all variables.
            used: The indices of the variables that have gradients.
            apply: Takes a gradient, or None, for each piece of the division.
            combined: The combined gradients.
        """
        # Keras would sum the gradients over tf.distribute's replicas once more.
        combined_already = distribute.distribution_mode(distribute.CombinedContext())
        with replica.equal_updates(self.name), combined_already:
            result = apply(division.spread(used, combined))
        copy_writes = copies.refresh(division.replicated(), replica)
        if copy_writes and isinstance(result, tf.Operation):
            return tf.group(result, *copy_writes)
        return result

    def _reducer(
        self,
        replica: context.ReplicaContext,
        division: Division,
        used: Sequence[int],
        grads: Sequence[Gradient],
        key: Any,
        scale: Callable[[], tf.Tensor | None],
    ) -> Reducer:
        """Returns the reducer for the gradients of some variables.

        Args:
            replica: The replica being built.
            division: The pieces of all variables.
            used: The indices of the variables that have gradients.
            grads: The gradients of their pieces.
            key: The variables' keys and the gradients' layouts.
            scale: As for `apply`.
        """
        pieces = [piece for k in used for piece in division.pieces[k]]
        return Reducer(
            self.compression,
            (_home(replica.build.graph), key),
            tuple(map(shapes.static, pieces)),
            [policy for k in used for policy in division.policies(k)],
            self.compression.of(pieces, grads),
            self._creating(replica),
            scale,
        )

    def _creating(self, replica: context.ReplicaContext) -> Callable[[], Any]:
        """Returns a function whose blocks create the optimizer's variables."""
        return replica.creating_for_all if self._shared else contextlib.nullcontext

    def _accumulate(
        self,
        replica: context.ReplicaContext,
        grads: Sequence[Gradient],
        key: Any,
        weight: Any,
        reduce: Reducer,
        update: Callable[[Sequence[Gradient]], Any],
        cut: Callable[[Sequence[Gradient]], list[Any]],
    ) -> tf.Operation:
        """Adds up this replica's gradients, and updates in each k-th step.

        The sums stay on their replica: there is one all_reduce per update, which moves
        nothing in the steps between.

        Args:
            replica: The replica being built.
            grads: This replica's gradients.
            key: The variables' keys and the gradients' layouts. Steps for which these
                are equal share their sums and their count; others have their own.
            weight: The gradients' weight in the mean, or None.
            reduce: Reduces the pieces of the gradients over the replicas.
            update: Applies the combined gradients.
            cut: Cuts gradients into pieces by the division.
        """
        op = self.op if weight is None else "sum"
        addends = [accumulators.wide(gradient) for gradient in grads]
        if weight is not None:
            weight = tf.cast(weight, accumulators.dtype_of_weights(addends))
            addends = [*(accumulators.scaled(g, weight) for g in addends), weight]
        store_key = (_home(replica.build.graph), weight is not None, key)
        if store_key not in self.accumulators:
            with self._creating(replica)():
                self.accumulators[store_key] = self.sums.create(addends, op, self.name)
        sums, counter = self.accumulators[store_key]
        with replica.equal_updates(self.name):
            step = counter.add(tf.constant(1, tf.int64))
        full = step >= self.accumulation_steps
        totals = [s.add(gradient) for s, gradient in zip(sums, addends, strict=True)]
        gradient_sums, weight_sums = totals[: len(grads)], totals[len(grads) :]
        totals = [*cut(gradient_sums), *weight_sums]
        dtypes = [piece.dtype for piece in cut(grads)]
        if not reduce.compresses:
            policies = [*reduce.policies, *([] if weight is None else [NO_POLICY])]
            reduced = _all_reduce_when(full, totals, op, policies)

        def combined() -> list[Gradient]:
            summed = totals if reduce.compresses else reduced
            if weight is None:  # `turn` exceeds k if a checkpoint held more steps
                factor = 1.0 / tf.cast(step, tf.float64)
            else:
                *summed, total_weight = summed
                if reduce.compresses:
                    (total_weight,) = all_reduce.combine([total_weight], "sum", None)
                factor = accumulators.reciprocal(total_weight)
            summed = [accumulators.scaled(g, factor) for g in summed]
            means = reduce(summed, op) if reduce.compresses else summed
            return [
                accumulators.cast(g, dtype)
                for g, dtype in zip(means, dtypes, strict=True)
            ]

        def apply_and_clear() -> tf.Tensor:
            result = update(combined())
            waits = [result] if isinstance(result, tf.Operation) else []
            with replica.equal_updates(self.name):
                for accumulator in (*sums, counter):
                    waits += accumulator.clear()
            with tf.control_dependencies(waits):
                return tf.constant(True)

        with replica.build.ledger.agreed(effects.Claim(self.name, wrapped=True)):
            return tf.cond(full, apply_and_clear, lambda: tf.constant(False)).op

    def apply_outside(
        self,
        grads: Sequence[Gradient | None],
        variables: Sequence[Any],
        prepare: Callable[[Sequence[Any]], Any],
        update: Callable[[Sequence[Any]], Any],
    ) -> Any:
        """Sums gradients of whole batches outside steps; updates at each k-th batch.

        Used when a model that trains on replicas runs on one device for a while, to be
        inspected. They are added to the sums of weighted steps, where a whole batch
        weighs 1.

        Args:
            grads: The gradients, one per variable, or None.
            variables: The variables that they are gradients of.
            prepare: As for `apply`.
            update: Updates the variables by gradients.
        """
        used = [k for k, gradient in enumerate(grads) if gradient is not None]
        if not used:
            return tf.no_op()
        used_grads = [grads[k] for k in used]
        with tf.init_scope():
            prepare([variables[k] for k in used])
        addends = [accumulators.wide(gradient) for gradient in used_grads]
        addends.append(tf.constant(1.0, accumulators.dtype_of_weights(addends)))
        key = (
            None,
            True,
            tuple(
                (sparsity.key_of(variables[k]), GradientLayout.of(grads[k]))
                for k in used
            ),
        )
        if key not in self.accumulators:
            self.accumulators[key] = self.sums.create(addends, "sum", self.name)
        sums, counter = self.accumulators[key]
        step = counter.add(tf.constant(1, tf.int64))
        *totals, weight = [s.add(g) for s, g in zip(sums, addends, strict=True)]

        def apply_and_clear() -> tf.Tensor:
            means: list[Gradient | None] = [None] * len(grads)
            for k, total, gradient in zip(used, totals, used_grads, strict=True):
                if isinstance(total, tf.IndexedSlices):
                    total = sparse.add_up(total)
                mean = accumulators.scaled(total, accumulators.reciprocal(weight))
                means[k] = accumulators.cast(mean, gradient.dtype)
            update(means)
            for accumulator in (*sums, counter):
                accumulator.clear()
            return tf.constant(True)

        full = step >= self.accumulation_steps
        return tf.cond(full, apply_and_clear, lambda: tf.constant(False))


def _home(graph: tf.Graph) -> Any:
    """Returns the tf.Graph that a build's variables belong to; None if eager."""
    return None if graph.building_function else graph


def _note_sparse(
    replica: context.ReplicaContext,
    variables: Sequence[Any],
    layouts: Sequence[GradientLayout | None],
) -> None:
    """Records for the strategy which gradients are sparse."""
    is_sparse = replica.build.states.of(SparseGradients)
    for variable, layout in zip(variables, layouts, strict=True):
        if layout is not None:
            key = getattr(plain(variable), "key", None)
            is_sparse[key] = layout.index_dtype is not None


def _all_reduce_when(
    full: tf.Tensor,
    totals: Sequence[Gradient],
    op: str,
    policies: Sequence[OperandPolicy],
) -> list[Gradient]:
    """Reduces if `full` is true; else moves no data and returns zeros or no rows."""
    dense = [t for t in totals if not isinstance(t, tf.IndexedSlices)]
    dense_policies = [
        policy
        for t, policy in zip(totals, policies, strict=True)
        if not isinstance(t, tf.IndexedSlices)
    ]
    reduced = iter(
        all_reduce.reduce_dense(dense, op, when=full, policies=dense_policies)
        if dense
        else []
    )
    results: list[Gradient] = []
    for total, policy in zip(totals, policies, strict=True):
        if not isinstance(total, tf.IndexedSlices):
            results.append(next(reduced))
            continue
        num_rows = tf.where(full, tf.shape(total.values)[0], 0)
        parts = [total.values[:num_rows], total.indices[:num_rows]]
        values, indices = all_gather.all_gather(parts, axis=0)
        gathered = tf.IndexedSlices(values, indices, total.dense_shape)
        group = context.require("all_gather").build.world.replica_ids
        count = len(group) if op == "mean" else 1
        results.append(sparse.add_up(gathered, count, group, policy))
    return results
