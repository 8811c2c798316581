# SPDX-License-Identifier: Apache-2.0
"""The forms of a graph's tensors, found without building anything."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import tensorflow as tf

from replicator import errors
from replicator.forms import propagate, rule, rules, sizes
from replicator.forms.forms import REPLICATED, Fact, Layout, Partial, Sharded
from replicator.forms.propagate import GraphPlan, Scope
from replicator.forms.rule import AS_IS, LOCAL, UNUSED

LAYOUT = Layout("batch")
BATCH = Sharded(0, LAYOUT)


def planned(function: Any, *shapes: Any, revise: bool = False) -> tuple[GraphPlan, Any]:
    """Returns the plan of a function of batches, and what the function returns."""
    with tf.Graph().as_default():
        inputs = [tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes]
        results = function(*inputs)
        given = [Fact(BATCH if t.shape[:1] == [None] else REPLICATED) for t in inputs]
        scope, plan = Scope(), GraphPlan(inputs, given)
        scope.extend(plan, [getattr(t, "op", t) for t in tf.nest.flatten(results)])
        if revise:
            scope.revise(plan)
    return plan, results


def test_the_gradient_of_a_weight_is_a_sum_and_of_examples_is_sharded():
    def loss_and_gradients(x, w):
        loss = tf.reduce_mean((x @ w) ** 2)
        return loss, *tf.gradients(loss, [x, w])

    plan, (loss, by_x, by_w) = planned(loss_and_gradients, [None, 4], [4, 2])
    assert plan.fact(loss).form == Partial()
    assert plan.fact(by_x).form == BATCH
    assert plan.fact(by_w).form == Partial()


def test_an_op_without_a_rule_takes_and_makes_values_of_one_device():
    plan, out = planned(lambda x: tf.raw_ops.Unique(x=x)[0], [None])
    assert plan.plans[out.op].needs == [REPLICATED]
    assert plan.fact(out).form == REPLICATED


def test_an_op_with_state_and_no_rule_is_built_once():
    plan, op = planned(lambda x: tf.raw_ops.PrintV2(input=tf.as_string(x[0])), [4])
    op = op if isinstance(op, tf.Operation) else op.op
    assert propagate.has_effect(op)
    calls: list[Any] = []

    class Replica:
        def once(self, op: Any, inputs: Any) -> Any:
            calls.append(op)
            return []

    plan.plans[op].build(Replica(), op, [None])
    assert calls == [op]


def test_what_is_known_of_shapes_needs_no_inputs():
    plan, out = planned(lambda x: tf.shape(x)[1] * 2, [None, 4])
    assert plan.plans[out.op].needs == [UNUSED] * 2
    assert sizes.ints(plan.fact(out)) == [8]


def test_the_shape_of_a_batch_has_a_local_version():
    plan, out = planned(lambda x: tf.shape(x), [None, 4])
    assert plan.plans[out.op].needs == [AS_IS]
    assert plan.plans[out.op].build_local is not None
    assert list(plan.fact(out).numbers) == [sizes.Size(LAYOUT, 1), 4]


def test_something_of_the_shape_of_a_batch_is_sharded_like_it():
    plan, out = planned(lambda x: tf.zeros([tf.shape(x)[0], 3]), [None, 4])
    assert plan.fact(out).form == BATCH
    assert plan.plans[out.op].needs[0] == LOCAL


def test_numbers_of_rows_are_kept_by_what_only_moves_them():
    plan, (rows, moved, added) = planned(
        lambda x: (
            rows := tf.range(tf.shape(x)[0]),
            tf.identity(tf.cast(rows, tf.int64)),
            rows + 1,
        ),
        [None, 4],
    )
    assert plan.fact(rows).rows is plan.fact(moved).rows is LAYOUT
    assert plan.fact(added).rows is None


def test_a_sum_that_something_needs_whole_is_a_sum_for_nothing_else():
    def squared_and_doubled(x):
        total = tf.reduce_sum(x, 0)
        return 2 * total, total**2  # the square of a sum, not the sum of squares

    plan, (doubled, _) = planned(squared_and_doubled, [None, 4])
    first = plan.fact(doubled).form
    plan, (doubled, _) = planned(squared_and_doubled, [None, 4], revise=True)
    assert {first, plan.fact(doubled).form} <= {Partial(), REPLICATED}
    assert plan.fact(doubled).form == REPLICATED


def test_only_what_a_sum_that_is_needed_whole_changes_is_planned_again():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 4])
        total = tf.reduce_sum(tf.exp(x), 0)
        doubled, squared = 2 * total, total**2
    scope, plan = Scope(), GraphPlan([x], [Fact(BATCH)])
    scope.extend(plan, [squared.op, doubled.op])  # from the last one
    assert plan.fact(doubled).form == Partial()
    before = dict(plan.plans)
    scope.revise(plan)
    again = {op for op in before if plan.plans[op] is not before[op]}
    assert doubled.op in again and again <= {doubled.op, squared.op}
    assert plan.fact(total).form == Partial()
    assert plan.fact(doubled).form == plan.fact(squared).form == REPLICATED


def test_ops_are_planned_behind_their_inputs_and_what_they_wait_for():
    def ordered(x):
        first = tf.exp(x)
        with tf.control_dependencies([first]):
            return tf.sin(x)

    plan, out = planned(ordered, [None])
    types = [op.type for op in plan.plans]
    assert types.index("Exp") < types.index(out.op.type)


def test_a_loop_of_tensorflow_1_is_refused_with_its_line():
    def looped(x):
        return tf.raw_ops.NextIteration(data=x)  # the loop is made here

    with pytest.raises(errors.UnsupportedError) as raised:
        planned(looped, [4])
    _, first = inspect.getsourcelines(looped)
    assert re.search(rf"test_propagate.py:{first + 1} in looped", str(raised.value))
    assert "enable_control_flow_v2" in str(raised.value)


def test_a_plan_explains_its_forms_and_conversions():
    plan, _ = planned(lambda x: tf.sort(tf.exp(x), 0), [None])
    text, batch = plan.explain(), "Sharded(axis=0, layout=batch, outer=1, inner=1)"
    assert f"Exp Exp: {batch}" in text
    assert f"    sort/Neg:0: {batch} -> Replicated()" in text


def test_each_type_of_op_has_one_rule():
    with pytest.raises(AssertionError, match="MatMul"):
        rule.rule("MatMul")(rule.about)


def test_rules_are_of_types_of_ops_that_exist():
    known = {*dir(tf.raw_ops), "TopK"}  # TopK: of TensorFlow 1's graphs
    unknown = sorted(set(rules.RULES) - known)
    assert not [name for name in unknown if not name.startswith("_")]
