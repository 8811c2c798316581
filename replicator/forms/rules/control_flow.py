# SPDX-License-Identifier: Apache-2.0
"""Rules of conditionals, loops and functions, which are built again for each replica.

The values that a loop carries keep their forms from turn to turn. These are found by
going through the body until they no longer change. What a body takes from outside and
does not change needs no place among its arguments: the new body captures it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator._tf import bodies, copying
from replicator.forms import sizes
from replicator.forms.forms import REPLICATED, UNSET, Fact, Sharded, Unset, joined
from replicator.forms.rule import UNUSED, OpPlan, rule

_TURNS = 6  # after so many, what still changes is replicated


def _by_turns(a: Fact, b: Fact, scope: Any) -> Fact:
    """Returns what is known of a tensor that is one or the other, by turns.

    What is replicated may have other numbers of rows than what is sharded, and is then
    not cut like that. A sum is not yet taken of either.
    """
    form = joined(a.form, b.form, is_list=True)
    if isinstance(form, Sharded) and form.layout.depth > scope.depth:
        return Fact(REPLICATED)
    branches: tuple[Fact, ...] = ()
    if a.branches or b.branches:
        pairs = zip(a.branches or b.branches, b.branches or a.branches, strict=True)
        branches = tuple(_by_turns(*pair, scope) for pair in pairs)
    return Fact(form, sizes.joined(a, b), branches=branches)


def _known(fact: Fact) -> Any:
    """Returns what can be compared of what is known of a tensor."""
    numbers = fact.numbers
    flat = numbers.tolist() if isinstance(numbers, np.ndarray) else numbers
    return fact.form, flat, [*map(_known, fact.branches)]


@rule("While StatelessWhile")
def loop(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """A loop of TensorFlow 2."""
    own, carried, body = _carried(op, facts, scope)
    test = scope.inner().called(copying.function_graph(op, "cond"), carried)

    def build(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[Any]:
        values = replica.seen_as(op.inputs, facts)
        kept = [k for k in own if k in body.carried]
        kept_facts = [carried[k] for k in kept]
        shapes = [s for k in kept for s in _shapes(body.inputs[k], carried[k])]

        def bound(flat: Sequence[tf.Tensor]) -> list[Any]:
            new = dict(zip(kept, replica.unflat(flat, kept_facts), strict=True))
            return [new.get(k, value) for k, value in enumerate(values)]

        def go_on(*flat: tf.Tensor) -> tf.Tensor:
            with replica.frame(test, bound(flat)) as found:
                test_result = found(test.outputs[0]).copy(REPLICATED)
                return _of_shapes([test_result], [tf.TensorShape([])])[0]

        def turn(*flat: tf.Tensor) -> list[tf.Tensor]:
            with replica.frame(body, bound(flat)) as found:
                after = [found(body.outputs[k]) for k in kept]
                tensors, effects = replica.flat(after, kept_facts), replica.effects()
                with tf.control_dependencies(effects):
                    return _of_shapes(tensors, shapes, bool(effects))

        before = [values[k] for k in kept]
        first = _of_shapes(replica.flat(before, kept_facts), shapes)
        iterations = op.get_attr("parallel_iterations")
        flat = bodies.while_loop(go_on, turn, first, shapes, iterations)
        replica.finished(op, flat[0].op)
        return bound(flat)

    return OpPlan([UNUSED] * len(facts), carried, build=build, bodies=[test, body])


def _carried(
    op: tf.Operation, facts: list[Fact], scope: Any
) -> tuple[list[int], list[Fact], Any]:
    """Returns the positions of what a loop changes, what is known of all in each turn.

    And the plan of its body.
    """
    function = graph, outputs = copying.function_graph(op, "body")
    pairs = zip(graph.inputs, outputs, strict=True)
    own = [k for k, (before, after) in enumerate(pairs) if after is not before]
    carried, inner = list(facts), scope.inner()
    for k in own:
        fact = facts[k]
        carried[k] = Fact(fact.form, fact.numbers, branches=fact.branches)
    body = inner.called(function, carried)
    for turn in range(2 * _TURNS):
        before = list(carried)
        for k in own:
            then = _by_turns(carried[k], body.fact(outputs[k]), scope)
            if _known(carried[k]) != _known(then):
                carried[k] = then if turn < _TURNS else Fact(REPLICATED)
        if carried == before:
            break
        body.know(graph.inputs, carried)
        inner.revise(body)
    return own, carried, body


def _shapes(tensor: tf.Tensor, fact: Fact) -> list[tf.TensorShape]:
    """Returns the static shapes of a carried value, and of its local version."""
    shape = tensor.shape
    if isinstance(fact.form, Sharded) and shape.rank and tensor.dtype != tf.variant:
        axes = shape.as_list()
        axes[fact.form.axis] = None
        shape = tf.TensorShape(axes)
    return [shape] * (2 if sizes.has_local(fact) else 1)


def _of_shapes(
    tensors: Sequence[tf.Tensor],
    shapes: Sequence[tf.TensorShape],
    is_after: bool = False,
) -> list[tf.Tensor]:
    """Returns tensors with static shapes, of which conversions may know less.

    Args:
        tensors: The tensors.
        shapes: Their shapes.
        is_after: Whether they come after what the block depends on.
    """
    results = []
    for tensor, shape in zip(tensors, shapes, strict=True):
        is_list = tensor.dtype == tf.variant
        is_known = is_list or tensor.shape.is_subtype_of(shape)
        results.append(tensor if is_known and not is_after else tf.identity(tensor))
        if not is_known:
            results[-1].set_shape(shape)
    return results


@rule("If StatelessIf Case StatelessCase")
def conditional(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """A conditional of TensorFlow 2. All replicas take the same branch."""
    is_case = op.type.endswith("Case")
    names = [("then_branch", 0), ("else_branch", 0)]
    if is_case:
        names = [("branches", k) for k in range(len(op.get_attr("branches")))]
    inner = scope.inner(in_branch=True)
    taken = [
        [f.branches[k] if f.branches else f for f in facts[1:]]
        for k in range(len(names))
    ]
    pairs = zip(taken, names, strict=True)
    branches = [
        inner.called(copying.function_graph(op, *one), own) for own, one in pairs
    ]
    found = zip(*(branch.returned() for branch in branches), strict=True)
    outs = zip(found, branches[0].outputs, strict=True)
    made = [_of_branches(list(every), out, scope) for every, out in outs]

    def build(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[Any]:
        def of_branch(k: int) -> list[tf.Tensor]:
            values = replica.seen_as(op.inputs[1:], taken[k])
            with replica.frame(branches[k], values) as found:
                tensors = replica.flat(list(map(found, branches[k].outputs)), made)
                with tf.control_dependencies(replica.effects()):
                    return [tf.identity(t) for t in tensors] or [tf.constant(0)]

        chosen = replica.value(op.inputs[0]).copy(REPLICATED)
        builders = [functools.partial(of_branch, k) for k in range(len(branches))]
        which = chosen if is_case else tf.cast(chosen, tf.bool)
        flat = bodies.branch(which, builders)
        replica.finished(op, flat[0].op)
        return replica.unflat(flat[: len(flat) if made else 0], made)

    return OpPlan([UNUSED] * len(facts), made, build=build, bodies=branches)


def _of_branches(facts: list[Fact], tensor: tf.Tensor, scope: Any) -> Fact:
    """Returns what is known of a result.

    Optional values for the gradient of either branch share places: none reads the
    other's, and their forms may differ. A list whose forms differ is not read at all.
    """
    if tensor.dtype != tf.variant:
        return functools.reduce(lambda a, b: _by_turns(a, b, scope), facts, Fact(UNSET))
    forms = [fact.form for fact in facts if not isinstance(fact.form, Unset)]
    is_one = all(form == forms[0] for form in forms)
    return Fact(forms[0] if forms and is_one else UNSET, branches=tuple(facts))


@rule("PartitionedCall StatefulPartitionedCall")
def call(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """A function, which is built where it is called."""
    plan = scope.called(copying.function_graph(op, "f"), facts)

    def build(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[Any]:
        with replica.frame(plan, replica.seen_as(op.inputs, facts), op) as found:
            return [found(out) for out in plan.outputs]

    needs = [UNUSED] * len(facts)
    return OpPlan(needs, plan.returned(), build=build, bodies=[plan])
