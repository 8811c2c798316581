"""How the gradients of all replicas become one gradient per variable.

Used by the wrapped optimizers of all families. Three things make this more than an
all_reduce: a variable may be unused on some replicas, gradients may be sparse, and an
update may gather the gradients of several steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.primitives import all_gather, all_reduce

Gradient = tf.Tensor | tf.IndexedSlices


@dataclasses.dataclass(frozen=True)
class Kind:
    """Whether a gradient is sparse, and the dtype of its indices if so."""

    index_dtype: str | None = None

    @classmethod
    def of(cls, gradient: Gradient | None) -> Kind | None:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return cls(gradient.indices.dtype.name)
        return cls()


@dataclasses.dataclass
class _Accumulator:
    """The sum of one variable's gradients over steps, on each replica its own.

    Dense sums have one variable, shaped as the gradient; sparse ones keep all rows:
    values [rows, ...] and indices [rows].
    """

    variables: list[tf.Variable]

    def add(self, gradient: Gradient) -> Gradient:
        """Adds a gradient; returns the sum."""
        if isinstance(gradient, tf.IndexedSlices):
            kept, indices = self.variables
            return tf.IndexedSlices(
                kept.assign(tf.concat([kept, gradient.values], 0)).read_value(),
                indices.assign(tf.concat([indices, gradient.indices], 0)).read_value(),
                gradient.dense_shape,
            )
        return self.variables[0].assign_add(gradient).read_value()

    def clear(self) -> list[Any]:
        """Sets the sum to zero; returns what has to be waited for."""
        sparse = len(self.variables) > 1
        return [
            v.assign(
                v.read_value()[:0] if sparse else tf.zeros_like(v), read_value=False
            )
            for v in self.variables
        ]


class Combiner:
    """Combines gradients over replicas and steps, for one optimizer.

    Args:
        op: "mean" or "sum", over the replicas.
        accumulation_steps: How many steps make one update, by the mean over them.
        name: The optimizer's, for the names of variables.
    """

    def __init__(self, op: str, accumulation_steps: int, name: str) -> None:
        self.op = op
        self.accumulation_steps = accumulation_steps
        self._name = name
        self._local: dict[Any, _Accumulator] = {}

    def apply(
        self,
        replica: context.ReplicaContext,
        grads: Sequence[Gradient | None],
        variables: Sequence[Any],
        weight: Any,
        prepare: Callable[[], Any],
        apply: Callable[[Sequence[Any]], Any],
    ) -> Any:
        """Combines and applies, in the step of one replica.

        Args:
            replica: The replica being built.
            grads: This replica's gradients.
            variables: What they are gradients of.
            weight: What they weigh in the mean over the replicas, or None.
            prepare: Creates the optimizer's variables, ahead of an update that happens
                in some steps only.
            apply: Updates by gradients that are equal on all replicas.

        Returns:
            What `apply` returns; with accumulation, an op after which all is done.
        """
        if weight is not None and self.op != "mean":
            raise errors.ArgumentError(
                f'{self._name} was given a weight, but was wrapped with op="{self.op}". '
                'Fix: weights go with op="mean".'
            )
        kinds = _agree_on_kinds(replica, self, self._name, grads)
        grads = [
            _as_kind(gradient, variable, kind)
            for gradient, variable, kind in zip(grads, variables, kinds, strict=True)
        ]
        used = [k for k, gradient in enumerate(grads) if gradient is not None]
        own = [grads[k] for k in used]

        def update(combined: Sequence[Gradient]) -> Any:
            everyone: list[Gradient | None] = [None] * len(grads)
            for k, gradient in zip(used, combined, strict=True):
                everyone[k] = gradient
            with replica.equal_updates():
                return apply(everyone)

        if self.accumulation_steps > 1 and own:
            with replica.equal_updates():
                prepare()
            keys = [_key(variables[k]) for k in used]
            return self._accumulate(replica, own, keys, weight, update)
        return update(all_reduce.all_reduce(own, self.op, weight))

    def _accumulate(
        self,
        replica: context.ReplicaContext,
        grads: Sequence[Gradient],
        keys: Sequence[Any],
        weight: Any,
        update: Callable[[Sequence[Gradient]], Any],
    ) -> tf.Operation:
        """Adds up this replica's gradients; in each k-th step, combines and applies.

        The sums stay on their replica: there is one all_reduce per update, and it does
        nothing in the steps between.
        """
        if weight is not None:
            weight = tf.cast(weight, tf.float32)
            grads = [*(_scaled(g, weight) for g in grads), weight]
            keys = [*keys, ("weight", replica.build.graph)]
        sums = [
            self._accumulator(key, gradient)
            for key, gradient in zip(keys, grads, strict=True)
        ]
        counter = self._accumulator(
            ("steps", _home(replica.build.graph)), tf.constant(0, tf.int64)
        )
        turn = counter.add(tf.constant(1, tf.int64))
        full = tf.equal(turn % self.accumulation_steps, 0)
        totals = [s.add(gradient) for s, gradient in zip(sums, grads, strict=True)]
        combined = _all_reduce_when(
            full, totals, "sum" if weight is not None else self.op
        )
        if weight is not None:
            *combined, total = combined
            combined = [_scaled(g, tf.math.divide_no_nan(1.0, total)) for g in combined]
        else:
            combined = [_scaled(g, 1.0 / self.accumulation_steps) for g in combined]

        def apply_and_clear() -> tf.Tensor:
            done = update(combined)
            waits = [done] if isinstance(done, tf.Operation) else []
            for accumulator in sums:
                waits += accumulator.clear()
            with tf.control_dependencies(waits):
                return tf.constant(True)

        with replica.build.ledger.agreed():
            return tf.cond(full, apply_and_clear, lambda: tf.constant(False)).op

    def _accumulator(self, key: Any, gradient: Gradient) -> _Accumulator:
        """Returns the accumulator of a variable, made when it is first asked for."""
        if key not in self._local:
            dtype = gradient.dtype
            name = f"{self._name}/accumulator"
            if isinstance(gradient, tf.IndexedSlices):
                rows = gradient.values.shape[1:]
                made = [
                    _local_variable(name, [0, *rows], dtype, [None, *rows]),
                    _local_variable(name, [0], gradient.indices.dtype, [None]),
                ]
            else:
                made = [_local_variable(name, gradient.shape, dtype, gradient.shape)]
            self._local[key] = _Accumulator(made)
        return self._local[key]


def _local_variable(name: str, size: Any, dtype: Any, shape: Any) -> tf.Variable:
    """Creates a variable whose components are each replica's own."""
    with tf.init_scope():
        return tf.Variable(
            lambda: tf.zeros(size, dtype),
            shape=tf.TensorShape(shape),
            dtype=dtype,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            name=name,
        )


def _home(graph: tf.Graph) -> Any:
    """Returns what the variables of a build belong to: its tf.Graph, or eager's None."""
    return None if graph.building_function else graph


def _key(variable: Any) -> Any:
    """Returns what identifies a variable, Keras' or TensorFlow's, among all others."""
    inside = getattr(variable, "value", variable)
    return (variable if callable(inside) else inside)._unique_id


def _agree_on_kinds(
    replica: context.ReplicaContext,
    owner: Any,
    name: str,
    grads: Sequence[Gradient | None],
) -> Sequence[Kind | None]:
    """Finds out which gradients the optimizer gets, dense or sparse, on any replica.

    A variable that is unused on some replicas counts as zeros there, and one that is
    unused on all is left alone; a replica alone cannot tell which. Replica 0's gradients
    are taken as typical; where a later replica finds them wrong, the step is built
    again, knowing better.
    """
    place = ("gradients", id(owner))
    place = (*place, replica.count(place))
    own = [Kind.of(gradient) for gradient in grads]
    build = replica.build
    kinds = build.knowledge.get(place) or build.findings.setdefault(place, own)
    if len(kinds) != len(own):
        raise errors.MismatchError(
            errors.compose(
                f"{name} is given {len(kinds)} gradients on replica 0 and {len(own)} on "
                f"replica {replica.replica_id}.",
                [f"at {errors.user_line()}"],
                "hand in the same variables on every replica; a gradient may be None.",
            )
        )
    merged = [_merge(one, two) for one, two in zip(kinds, own, strict=True)]
    if merged != list(kinds):
        build.knowledge[place] = merged
        raise context.BuildAgain
    return kinds


def _merge(one: Kind | None, two: Kind | None) -> Kind | None:
    if one is None or two is None:
        return one or two
    return one if one == two else Kind()


def _as_kind(
    gradient: Gradient | None, variable: Any, kind: Kind | None
) -> Gradient | None:
    """Makes a gradient dense or sparse; None becomes zeros, unless all have None."""
    if kind is None:
        return None
    if gradient is not None:
        return gradient if Kind.of(gradient) == kind else tf.convert_to_tensor(gradient)
    value = tf.convert_to_tensor(variable)
    if kind.index_dtype is None:
        return tf.zeros_like(value)
    return tf.IndexedSlices(
        tf.zeros_like(value[:0]), tf.zeros([0], kind.index_dtype), tf.shape(value)
    )


def _scaled(gradient: Gradient, factor: Any) -> Gradient:
    """Multiplies a gradient; a factor of 0 gives 0 whatever the gradient holds."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _scaled(gradient.values, factor), gradient.indices, gradient.dense_shape
        )
    return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))


def _all_reduce_when(
    full: tf.Tensor, totals: Sequence[Gradient], op: str
) -> list[Gradient]:
    """Reduces where `full` is true; else returns zeros, or no rows, having moved none."""
    dense = [t for t in totals if not isinstance(t, tf.IndexedSlices)]
    reduced = iter(all_reduce.reduce_dense(dense, op, when=full) if dense else [])
    results: list[Gradient] = []
    for total in totals:
        if not isinstance(total, tf.IndexedSlices):
            results.append(next(reduced))
            continue
        rows = tf.where(full, tf.shape(total.values)[0], 0)
        parts = [total.values[:rows], total.indices[:rows]]
        values, indices = all_gather.all_gather(parts, axis=0)
        gathered = tf.IndexedSlices(values, indices, total.dense_shape)
        replicas = context.require("all_gather").num_replicas
        results.append(_scaled(gathered, 1 / replicas) if op == "mean" else gathered)
    return results
