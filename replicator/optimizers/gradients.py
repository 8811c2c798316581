"""How the gradients of all replicas become one gradient per variable.

Used by the wrapped optimizers of all families. Three things make this more than an
all_reduce: a variable may be unused on some replicas, gradients may be sparse, and an
update may gather the gradients of several steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.compressors.base import Compressor
from replicator.graph.ir.placeholder import NO_POLICY
from replicator.graph.order import effects
from replicator.optimizers import accumulators
from replicator.optimizers.accumulators import Accumulators, Gradient, Sums
from replicator.optimizers.compression import Compression, Reducer
from replicator.optimizers.due import all_reduce_when
from replicator.optimizers.parts import Division
from replicator.optimizers.sparsity import Layout, as_layout, merge_all
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
        if weight is not None and self.op != "mean":
            raise errors.ArgumentError(
                errors.compose(
                    f"{self.name} was given a weight on replica {replica.replica_id}, "
                    f'but was wrapped with op="{self.op}".',
                    [f"at {errors.user_line()}"],
                    'weights go with op="mean".',
                )
            )
        layouts = self._agree_on_layouts(replica, grads, variables, weight is not None)
        if layouts is None:
            return tf.no_op()
        sparse = replica.build.findings.setdefault(SPARSE, {})
        for variable, layout in zip(variables, layouts, strict=True):
            if layout is not None:
                key = getattr(plain(variable), "key", None)
                sparse[key] = layout.index_dtype is not None
        grads = [
            as_layout(gradient, variable, layout)
            for gradient, variable, layout in zip(
                grads, variables, layouts, strict=True
            )
        ]
        used = [k for k, gradient in enumerate(grads) if gradient is not None]
        own = [grads[k] for k in used]

        def cut(wholes: Sequence[Gradient]) -> list[Any]:
            pairs = zip(used, wholes, strict=True)
            return [piece for k, whole in pairs for piece in division.cut(whole, k)]

        def update(combined: Sequence[Gradient]) -> Any:
            left = iter(combined)
            everyone = [
                None if grads[k] is None else next(left)
                for k, own in enumerate(division.pieces)
                for _ in own
            ]
            # Keras would sum them over the replicas of tf.distribute once more.
            combined_already = _tf.distribution_mode(_tf.CombinedContext())
            with replica.equal_updates(self.name), combined_already:
                done = apply(everyone)
            refreshed = copies.refresh(division.replicated(), replica)
            if refreshed and isinstance(done, tf.Operation):
                return tf.group(done, *refreshed)
            return done

        if own:
            needed = [variables[k] for k in used]
            if self._shared:
                # Outside of the function that is traced: some assign to what they
                # create, which is to happen once, and not in every step.
                with replica.creating_for_all(), tf.init_scope():
                    prepare(needed)
            else:
                with replica.equal_updates(self.name):
                    prepare(needed)
        what = tuple((key_of(variables[k]), layouts[k]) for k in used)
        reduce = self._reducer(replica, division, used, cut(own), what, scale)
        if self.accumulation_steps > 1 and own:
            return self._accumulate(replica, own, what, weight, reduce, update, cut)
        return update(reduce(cut(own), self.op, weight))

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

    def _agree_on_layouts(
        self,
        replica: context.ReplicaContext,
        grads: Sequence[Gradient | None],
        variables: Sequence[Any],
        weighted: bool,
    ) -> Sequence[Layout | None] | None:
        """Finds out which gradients there are, dense or sparse, on any replica.

        A variable that is unused on some replicas counts as zeros there, and one that
        is unused on all is left alone; a replica alone cannot tell which. Replica 0's
        gradients are taken as typical; where a later replica finds them wrong, the step
        is built again, knowing better. The replicas' n-th calls belong together,
        whichever objects they are called on: an optimizer made inside step_fn is
        another one on each replica.

        Returns:
            The layout of each gradient, None for what no replica uses; or nothing, if
            no update must be built yet, because the step will be built again.
        """
        place = ("gradients", replica.count("gradients"))
        own = _Handed.by(replica, self.name, grads, variables, weighted)
        build = replica.build
        first = build.findings.setdefault(place, own)
        first.check_pairs_with(own)
        known = build.knowledge.get(place)
        # What replica 0 does not use must be known for sure where guessing does harm:
        # optimizers refuse to be given nothing at all, and slots that are made inside
        # step_fn are told apart by the order in which they are made.
        used = [layout is not None for layout in first.layouts]
        guess = any(used) if self._shared else all(used)
        if known is None and not guess and replica.num_replicas > 1:
            so_far = build.findings.get(("merged", place), first.layouts)
            merged = merge_all(so_far, own.layouts)
            build.findings["merged", place] = merged
            if replica.replica_id != build.traced[-1]:
                return None
        else:
            layouts = first.layouts if known is None else known
            merged = merge_all(layouts, own.layouts)
            if merged == layouts:
                return layouts
        build.knowledge[place] = merged
        raise context.BuildAgain

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


def key_of(variable: Any) -> Any:
    """Returns what identifies a variable, Keras' or TensorFlow's, among all others."""
    inside = plain(variable)
    return inside.ref() if isinstance(inside, tf.Variable) else id(inside)


@dataclasses.dataclass(frozen=True)
class _Handed:
    """What a replica handed to its n-th call of a wrapped optimizer.

    Attributes:
        optimizer: The name of its class.
        variables: Their keys.
        layouts: Of the gradients; None where there was none.
        weighted: Whether a weight was given.
        site: All of this in words, with the user's line.
    """

    optimizer: str
    variables: tuple[Any, ...]
    layouts: tuple[Layout | None, ...]
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
    ) -> _Handed:
        """Notes what the replica being built passes."""
        names = [getattr(variable, "name", "?") for variable in variables]
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        return cls(
            optimizer,
            tuple(map(key_of, variables)),
            tuple(map(Layout.of, grads)),
            weighted,
            f"replica {replica.replica_id} ({replica.device}): {optimizer}, "
            f"{len(names)} gradients, of {shown}, "
            f"{'with a' if weighted else 'without'} weight, at {errors.user_line()}",
        )

    def check_pairs_with(self, other: _Handed) -> None:
        """Raises MismatchError unless two replicas' calls belong together."""
        sites = [self.site, other.site]
        if (self.optimizer, self.variables) != (other.optimizer, other.variables):
            raise errors.MismatchError(
                errors.compose(
                    "the replicas apply gradients of different variables, or in "
                    "another order.",
                    sites,
                    "pass the same variables in the same order on every replica; "
                    "the gradient of a variable that a replica does not use is None.",
                )
            )
        if self.weighted != other.weighted:
            raise errors.MismatchError(
                errors.compose(
                    "the replicas apply gradients with a weight and without one.",
                    sites,
                    "give a weight on every replica, or on none.",
                )
            )
