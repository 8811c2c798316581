# SPDX-License-Identifier: Apache-2.0
"""Statistics of each replica's own rows, in place of those of the whole batch.

What tf.nn.moments returns, and what is computed of it element by element, has a form of
its own, `Own`, where

    y = x * scale * rsqrt(variance + epsilon) + ...

Rows that meet it are rows as before. What sums up over rows, as the gradients of
broadcasting do, is a summand of what one device computes; at the same time, it is the
gradient of the replica's own statistics. Their rows take it in place of the sum over
the replicas: that is all that differs in the backward pass.

Where statistics are used for anything else, they stay those of the whole batch. So do
those in functions, loops and branches, whose gradients are in other graphs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator.forms.forms import REPLICATED, Fact, Own, Partial, Sharded
from replicator.forms.rule import AS_IS, UNUSED, OpPlan
from replicator.forms.rules import elementwise, normalization, reductions, shapes
from replicator.graph.ir import walk

# Of each element of own statistics, they compute one of the same replica's.
_BY_ELEMENT = {
    *elementwise.TYPES.split(),
    *elementwise.MOVING.split(),
    *"Squeeze ExpandDims Reshape".split(),
}

Key = tuple[Any, tuple[int, ...]]  # a reference of a tensor, and axes
Decide = Callable[[tf.Operation, list[Fact], Any], OpPlan]


class Statistics:
    """Which statistics of a graph are each replica's own.

    Args:
        graph: The graph.

    Attributes:
        missed: The means that are those of the whole batch all the same.
    """

    def __init__(self, graph: tf.Graph) -> None:
        ops = graph.get_operations()
        # Keys are those of the means: by mean or variance, by what gradients broadcast.
        self._means = _means(ops)
        self._gradients = dict(_gradients(ops, self._means))
        self._made: set[Key] = set()
        self._unfit = _differentiated_twice(self._gradients)
        self._backward: set[tf.Operation] | None = None
        self.missed: dict[tf.Operation, None] = {}
        self.drop()

    def plan(
        self, op: tf.Operation, facts: list[Fact], scope: Any, decide: Decide
    ) -> OpPlan | None:
        """Returns the plan of an op that makes own statistics or uses them, or None.

        Args:
            op: The op.
            facts: What is known of its inputs.
            scope: What else its rule may want to know.
            decide: Returns the plan of an op that does not.
        """
        if op.type == "Mean":
            return self._mean(op, facts)
        if any(isinstance(fact.form, Own) for fact in facts):
            return self._used(op, facts, scope, decide)
        of = self._gradients.get(op)
        if of is None or of not in self._made:
            return None
        its = shapes.broadcast_to(op, [Fact(), facts[1]], scope)
        form = its.makes[0].form if its else None
        if not its or facts[0].form != Partial() or not isinstance(form, Sharded):
            self._unfit.add(of)
            return None
        build = functools.partial(_spread, form=form)
        return dataclasses.replace(its, needs=[Partial(), its.needs[1]], build=build)

    def _mean(self, op: tf.Operation, facts: list[Fact]) -> OpPlan | None:
        found, of = reductions.over_rows(op, facts), self._means.get(op)
        if found is None:
            return None
        if of is None:
            if normalization.moments_of(op) is not None:
                self.missed[op] = None
            return None
        form, along = found
        self._made.add(of)

        def build(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[Any]:
            return [normalization.own_mean(inputs[0], along)[0]]

        return OpPlan([form, UNUSED], [Fact(Own(form.layout, of))], build)

    def _used(
        self, op: tf.Operation, facts: list[Fact], scope: Any, decide: Decide
    ) -> OpPlan:
        """Returns the plan of an op that takes own statistics."""
        forms = {k: f.form for k, f in enumerate(facts) if isinstance(f.form, Own)}
        plain = [Fact() if k in forms else fact for k, fact in enumerate(facts)]
        its = decide(op, plain, scope)
        needs = {its.needs[k] for k in forms}
        if needs <= {AS_IS, UNUSED}:
            return its  # only of the shape, or to be printed
        own = {*forms.values()}
        form = next(iter(own))
        if op.type in _BY_ELEMENT and needs <= {REPLICATED} and len(own) == 1:
            return dataclasses.replace(
                its,
                needs=[AS_IS if k in forms else n for k, n in enumerate(its.needs)],
                makes=[Fact(form) if f.form == REPLICATED else f for f in its.makes],
            )
        is_last = not any(out.dtype.is_floating for out in op.outputs)
        if not is_last or not all(op.inputs[k].dtype.is_floating for k in forms):
            self._unfit |= {one.of for one in own}
        return its  # a write, say, which takes the mean over the replicas

    def may_be_known(self, op: tf.Operation) -> bool:
        """Whether an op may be given sums that others need as on one device."""
        return self._backward is not None and op not in self._backward

    def settle(self, plan: Any) -> None:
        """Finds what gradients of own statistics are computed from.

        Args:
            plan: A plan of the graph (propagate.GraphPlan).
        """
        self._backward = set()
        for op, its in plan.plans.items():
            forms = [plan.fact(t).form for t in op.inputs]
            of = {form.of for form in forms if isinstance(form, Own)}
            if not of and self._gradients.get(op) in self._made:
                of = {self._gradients[op]}
            elif not of or not any(f.form == Partial() for f in its.makes):
                continue
            reached, are_gradients = _behind(plan, op)
            self._backward |= reached
            if not are_gradients:
                self._unfit |= of

    def drop(self) -> bool:
        """Leaves statistics to the whole batch that cannot be own; whether any are."""
        dropped = [op for op, of in self._means.items() if of in self._unfit]
        for op in dropped:
            del self._means[op]
        self._made, self._backward, self._unfit = set(), None, set()
        return bool(dropped)


def _means(ops: Sequence[tf.Operation]) -> dict[tf.Operation, Key]:
    """Returns means and variances of which the gradients are recognized, with keys."""
    pairs = {op: normalization.moments_of(op) for op in ops if op.type == "Mean"}
    others = {_key(*op.inputs) for op, pair in pairs.items() if pair is None}
    found = {}
    for op, pair in pairs.items():
        x = op.inputs[0].shape
        # Of others, the gradients are of other ops; see TensorFlow's math_grad.py.
        if pair is None or x.rank is None or None not in x.as_list():
            continue
        keys = [_key(*one.inputs) for one in pair]
        if not {*keys} & others and len(keys[0][1]) < x.rank:
            found[op] = keys[0]
    return found


def _key(x: tf.Tensor, axes: tf.Tensor) -> Key:
    """Returns what is equal for means of the same tensor along the same axes."""
    found, rank = tf.get_static_value(axes), x.shape.rank
    is_known = found is not None and rank
    return x.ref(), tuple(sorted(found.ravel() % rank)) if is_known else ()


def _gradients(
    ops: Sequence[tf.Operation], means: dict[tf.Operation, Key]
) -> Iterator[tuple[tf.Operation, Key]]:
    """Yields what broadcasts gradients of statistics, with their keys.

    TensorFlow makes BroadcastTo(gradient, Shape(x)) / Cast(Prod(Gather(Shape(x),
    (axes + rank) % rank))), of the x and the axes of the Mean.
    """
    by_inputs = {_key(*op.inputs): of for op, of in means.items()}
    for op in ops:
        if op.type != "RealDiv" or op.inputs[0].op.type != "BroadcastTo":
            continue
        sizes = normalization.up(op.inputs[1], "Cast", "Prod", "GatherV2")
        axes = normalization.up(sizes.inputs[1], "FloorMod", "AddV2") if sizes else None
        shape = normalization.up(sizes.inputs[0], "Shape") if sizes else None
        if axes and shape and _is_gradient(op):
            of = by_inputs.get(_key(shape.inputs[0], axes.inputs[0]))
            if of is not None:
                yield op.inputs[0].op, of


def _is_gradient(op: tf.Operation) -> bool:
    """Whether TensorFlow has made an op for a gradient, by the scope of its name."""
    return "gradient_tape/" in op.name or "_grad/" in op.name


def _differentiated_twice(gradients: dict[tf.Operation, Key]) -> set[Key]:
    """Returns the keys of which gradients are computed from other gradients."""
    found = set()
    for of in {*gradients.values()}:
        its = [op for op, other in gradients.items() if other == of]
        if len(its) < 3:  # of the mean and of the variance
            continue
        before = [t.op for op in its for t in op.inputs]
        if {*its} & walk.upstream(before, walk.computed_from):
            found.add(of)
    return found


def _behind(plan: Any, end: tf.Operation) -> tuple[set[tf.Operation], bool]:
    """Returns the ops that make the sums that an op takes, back to gradients' sums.

    Also whether they are all sums that gradients of broadcasting are.
    """

    def sums(op: tf.Operation) -> list[tf.Operation]:
        return [t.op for t in op.inputs if plan.fact(t).form == Partial()]

    reached = walk.upstream([end], sums)
    first = [op for op in reached if not sums(op)]
    return reached, all(op.type == "Sum" and _is_gradient(op) for op in first)


def _spread(
    replica: Any, op: tf.Operation, inputs: Sequence[Any], form: Sharded
) -> list[tf.Tensor]:
    """Broadcasts a gradient, which is then divided by the rows of all replicas."""
    gradient, sizes = inputs
    own, rows = replica.own_rows(form.layout), replica.rows(form.layout)
    factor = tf.cast(rows / tf.maximum(own, 1), gradient.dtype)
    return list(replica.stamp(op, [gradient * factor, sizes]))
