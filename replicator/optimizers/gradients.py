# SPDX-License-Identifier: Apache-2.0
"""How the gradients of all replicas become one gradient per variable.

Used by the wrapped optimizers of all families. Three things make this more than an
all_reduce: a variable may be unused on some replicas, gradients may be sparse, and an
update may gather the gradients of several steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.compressors.base import Compressor
from replicator.graph.ir.placeholder import NO_POLICY
from replicator.graph.order import effects
from replicator.optimizers import accumulators, sparsity
from replicator.optimizers.accumulators import Accumulators, Gradient, Sums
from replicator.optimizers.compression import Compression, Reducer
from replicator.optimizers.due import all_reduce_when
from replicator.optimizers.parts import Division
from replicator.optimizers.sparsity import Layout
from replicator.primitives import all_reduce
from replicator.variables import copies
from replicator.variables.chooser import SPARSE
from replicator.variables.replicated import plain


class Combiner:
    """Combines gradients over replicas and steps, for one optimizer.

    Args:
        op: "mean" or "sum", over the replicas.
        accumulation_steps: How many steps make one update, by the mean over them.
        name: The optimizer's, for the names of variables.
        shared: Whether all replicas use one optimizer; else it is made inside step_fn,
            another one on each replica.
        compressor: Of gradients of variables whose synchronizers name none, if any.

    Attributes:
        name: The optimizer's.
        compression: What compresses gradients, and what that remembers.
        sums: What has been accumulated, for checkpoints.
        accumulators: The same, by where and of what it is.
        alone: Whether whole batches come outside of steps, to be accumulated there.
        warned: Whether it was said that it is applied on one device.
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
        self.sums = Sums()
        self.warned = False
        self.alone = False
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
    ) -> Any:
        """Combines and applies, in the step of one replica.

        Args:
            replica: The replica being built.
            grads: This replica's gradients.
            variables: What they are gradients of.
            weight: What they weigh in the mean over the replicas, or None.
            prepare: Creates the optimizer's variables that do not exist yet; given the
                variables that are used on any replica.
            apply: Updates by gradients that are equal on all replicas, one for each
                piece of the division.
            division: The parts of variables that are updated part by part.
            scale: Returns what the gradients are multiplied by for a while, or None;
                called once its variables exist.

        Returns:
            What `apply` returns; with accumulation, an op after which all is done.
        """
        self._refuse_weight(replica, weight)
        layouts = sparsity.agree(
            replica, grads, variables, weight is not None, self.name, self._shared
        )
        if layouts is None:
            return tf.no_op()
        _note_sparse(replica, variables, layouts)
        triples = zip(grads, variables, layouts, strict=True)
        grads = [sparsity.as_layout(*own) for own in triples]
        used = [k for k, gradient in enumerate(grads) if gradient is not None]
        own = [grads[k] for k in used]
        cut = functools.partial(division.cut_some, used)
        update = functools.partial(self._update, replica, division, used, apply)
        if own:
            self._prepare(replica, prepare, [variables[k] for k in used])
        what = tuple((sparsity.key_of(variables[k]), layouts[k]) for k in used)
        reduce = self._reducer(replica, division, used, cut(own), what, scale)
        if self.accumulation_steps > 1 and own:
            return self._accumulate(replica, own, what, weight, reduce, update, cut)
        return update(reduce(cut(own), self.op, weight))

    def _refuse_weight(self, replica: context.ReplicaContext, weight: Any) -> None:
        """Raises ArgumentError if there is a weight, but no mean that it is for."""
        if weight is not None and self.op != "mean":
            raise errors.ArgumentError(
                errors.compose(
                    f"{self.name} was given a weight on replica {replica.replica_id}, "
                    f'but was wrapped with op="{self.op}".',
                    [f"at {errors.user_line()}"],
                    'weights go with op="mean".',
                )
            )

    def _prepare(
        self,
        replica: context.ReplicaContext,
        prepare: Callable[[Sequence[Any]], Any],
        variables: Sequence[Any],
    ) -> None:
        """Creates the optimizer's variables that do not exist yet."""
        if self._shared:
            # Outside of the function that is traced: some assign to what they create,
            # which is to happen once, and not in every step.
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
        """Applies the combined gradients of the pieces of the variables that are used.

        Args:
            replica: The replica being built.
            division: The pieces of all variables.
            used: Which of these have gradients.
            apply: Is given a gradient, or None, for each piece of the division.
            combined: The gradients.
        """
        # Keras would sum them over the replicas of tf.distribute once more.
        combined_already = _tf.distribution_mode(_tf.CombinedContext())
        with replica.equal_updates(self.name), combined_already:
            done = apply(division.spread(used, combined))
        refreshed = copies.refresh(division.replicated(), replica)
        if refreshed and isinstance(done, tf.Operation):
            return tf.group(done, *refreshed)
        return done

    def _reducer(
        self,
        replica: context.ReplicaContext,
        division: Division,
        used: Sequence[int],
        grads: Sequence[Gradient],
        what: Any,
        scale: Callable[[], tf.Tensor | None],
    ) -> Reducer:
        """Returns what reduces the gradients of some variables over the replicas.

        Args:
            replica: The replica being built.
            division: The pieces of all variables.
            used: Which of these have gradients.
            grads: The gradients of their pieces.
            what: What they are gradients of.
            scale: As for `apply`.
        """
        pieces = [piece for k in used for piece in division.pieces[k]]
        return Reducer(
            self.compression,
            (_home(replica.build.graph), what),
            [policy for k in used for policy in division.policies(k)],
            self.compression.of(pieces, grads),
            self._creating(replica),
            scale,
        )

    def _creating(self, replica: context.ReplicaContext) -> Callable[[], Any]:
        """Returns what makes a block in which the optimizer's variables are created."""
        return replica.creating_for_all if self._shared else contextlib.nullcontext

    def _accumulate(
        self,
        replica: context.ReplicaContext,
        grads: Sequence[Gradient],
        what: Any,
        weight: Any,
        reduce: Reducer,
        update: Callable[[Sequence[Gradient]], Any],
        cut: Callable[[Sequence[Gradient]], list[Any]],
    ) -> tf.Operation:
        """Adds up this replica's gradients; in each k-th step, combines and applies.

        The sums stay on their replica: there is one all_reduce per update, and it does
        nothing in the steps between.

        Args:
            replica: The replica being built.
            grads: This replica's gradients.
            what: What they are gradients of. All steps that pass gradients of the
                same share their sums and their count; others have their own.
            weight: What the gradients weigh in the mean, or None.
            reduce: Reduces what they are cut into over the replicas.
            update: Applies the combined gradients.
            cut: Returns the gradients of parts, as the division says.
        """
        op = self.op if weight is None else "sum"
        addends = [accumulators.wide(gradient) for gradient in grads]
        if weight is not None:
            weight = tf.cast(weight, tf.float32)
            addends = [*(accumulators.scaled(g, weight) for g in addends), weight]
        key = (_home(replica.build.graph), weight is not None, what)
        if key not in self.accumulators:
            with self._creating(replica)():
                self.accumulators[key] = self.sums.create(addends, op, self.name)
        sums, counter = self.accumulators[key]
        with replica.equal_updates(self.name):
            turn = counter.add(tf.constant(1, tf.int64))
        full = turn >= self.accumulation_steps
        totals = [s.add(gradient) for s, gradient in zip(sums, addends, strict=True)]
        whole, rest = totals[: len(grads)], totals[len(grads) :]
        totals = [*cut(whole), *rest]
        dtypes = [piece.dtype for piece in cut(grads)]
        if not reduce.compresses:
            known = [*reduce.policies, *([] if weight is None else [NO_POLICY])]
            reduced = all_reduce_when(full, totals, op, known)

        def combined() -> list[Gradient]:
            own = totals if reduce.compresses else reduced
            if weight is None:  # more steps than wanted, if a checkpoint held more
                factor = 1.0 / tf.cast(turn, tf.float64)
            else:
                *own, total = own
                if reduce.compresses:
                    (total,) = all_reduce.combine([total], "sum", None)
                factor = tf.math.divide_no_nan(1.0, total)
            own = [accumulators.scaled(g, factor) for g in own]
            made = reduce(own, op) if reduce.compresses else own
            return [
                accumulators.cast(g, dtype)
                for g, dtype in zip(made, dtypes, strict=True)
            ]

        def apply_and_clear() -> tf.Tensor:
            done = update(combined())
            waits = [done] if isinstance(done, tf.Operation) else []
            with replica.equal_updates(self.name):
                for accumulator in (*sums, counter):
                    waits += accumulator.clear()
            with tf.control_dependencies(waits):
                return tf.constant(True)

        with replica.build.ledger.agreed(effects.Claim(self.name, wrapped=True)):
            return _tf.cond(full, apply_and_clear, lambda: tf.constant(False)).op


def _home(graph: tf.Graph) -> Any:
    """Returns what a build's variables belong to: its tf.Graph, or eager's None."""
    return None if graph.building_function else graph


def _note_sparse(
    replica: context.ReplicaContext,
    variables: Sequence[Any],
    layouts: Sequence[Layout | None],
) -> None:
    """Notes which gradients are sparse, for the strategy."""
    sparse = replica.build.findings.setdefault(SPARSE, {})
    for variable, layout in zip(variables, layouts, strict=True):
        if layout is not None:
            key = getattr(plain(variable), "key", None)
            sparse[key] = layout.index_dtype is not None
