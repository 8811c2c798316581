# SPDX-License-Identifier: Apache-2.0
"""Finds the form of every tensor of a graph, without building anything.

Goes through the ops, from inputs to outputs, and asks the rule of each. Backward
passes, optimizers and metrics are ops like all others. Which sums something needs as
they are on one device is known only then: what that changes is planned again.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import copying
from replicator.forms import evaluation, sizes
from replicator.forms.forms import REPLICATED, Fact, Partial, Sharded
from replicator.forms.rule import (
    AS_IS,
    UNUSED,
    OpPlan,
    Version,
    replicated,
    stamped,
)
from replicator.forms.rules import RULES
from replicator.forms.twins import Twins
from replicator.graph.ir import functional, walk
from replicator.graph.ir.kinds import PYTHON

# These pass on numbers of rows.
_KEEP_ROWS = set("Squeeze ExpandDims Reshape Cast Pack".split())
# These have state, and are nevertheless not run unless something uses their outputs.
_ONLY_READ = set(
    "Placeholder VarHandleOp ReadVariableOp VariableShape ResourceGather Const "
    "ResourceGatherNd VarIsInitializedOp".split()
)
_WHOLE = Fact()


class GraphPlan:
    """The plans of a graph's ops, in the order in which they are built.

    Args:
        inputs: The tensors that are given.
        facts: What is known of these.
        after: Ops that come before others, though nothing in the graph says so.
        outputs: What a function returns, if the graph is of one.

    Attributes:
        facts: What is known of each tensor, by its reference.
        plans: What becomes of each op.
        seen: What was known of each op's inputs when it was planned.
        twins: Which ops compute the same.
        needed: The ops that are built (liveness.py).
        carried: Which values a loop carries from turn to turn, of the body of one.
    """

    def __init__(
        self,
        inputs: Sequence[tf.Tensor] = (),
        facts: Sequence[Fact] = (),
        after: Mapping[tf.Operation, Sequence[tf.Operation]] | None = None,
        outputs: Sequence[tf.Tensor] = (),
    ) -> None:
        self.inputs, self.outputs, self.after = inputs, outputs, after or {}
        self.facts: dict[Any, Fact] = {}
        self.plans: dict[tf.Operation, OpPlan] = {}
        self.seen: dict[tf.Operation, list[Fact]] = {}
        self.twins = Twins()
        self.needed: set[tf.Operation] = set()
        self.carried: set[int] = set()
        self.know(inputs, facts)

    def know(self, tensors: Iterable[tf.Tensor], facts: Iterable[Fact]) -> None:
        """Says what is known of tensors."""
        refs = (t.ref() for t in tensors)
        self.facts.update(zip(refs, facts, strict=True))

    def returned(self) -> list[Fact]:
        """Returns what is known of the outputs."""
        return [self.fact(out) for out in self.outputs]

    def before(self, op: tf.Operation) -> list[tf.Operation]:
        """Returns the ops that an op waits for, in the same order in all processes."""
        controls = sorted(op.control_inputs, key=lambda one: one.name)
        others = [*controls, *self.after.get(op, ()), *self.twins.of(op)]
        return [*(t.op for t in op.inputs), *others]

    def fact(self, tensor: tf.Tensor) -> Fact:
        """Returns what is known of a tensor of the graph."""
        return self.facts[tensor.ref()]

    def explain(self, indent: str = "") -> str:
        """Returns the forms of each op's outputs, and what is converted for it."""
        lines = []
        for op, plan in self.plans.items():
            made = ", ".join(str(fact.form) for fact in plan.makes)
            lines.append(f"{indent}{op.type} {op.name}: {made}")
            for tensor, need in zip(op.inputs, plan.needs, strict=True):
                form = self.fact(tensor).form
                if not isinstance(need, Version) and need != form:
                    lines.append(f"{indent}    {tensor.name}: {form} -> {need}")
            lines += [body.explain(indent + "  ") for body in plan.bodies]
        return "\n".join(line for line in lines if line)


class Scope:
    """What the rules of ops know that is not in the graph.

    Attributes:
        depth: The number of bodies of conditionals and loops around an op.
        in_branch: Whether one is a branch. No rows are counted there: the branch of its
            gradient, which is another graph, would not know how many they are.
        whole: References of sums that something needs as they are on one device. What
            else is computed from these need not be a sum.
        own: Which statistics are those of each replica's rows; None: none.
    """

    def __init__(
        self,
        depth: int = 0,
        whole: set[Any] | None = None,
        own: Any = None,
        in_branch: bool = False,
    ) -> None:
        self.depth, self.own, self.in_branch = depth, own, in_branch
        self.whole: set[Any] = set() if whole is None else whole

    def inner(self, in_branch: bool = False) -> Scope:
        """Returns the scope of the ops in the body of a conditional or a loop."""
        in_branch = in_branch or self.in_branch
        return Scope(self.depth + 1, self.whole, self.own, in_branch)

    def called(
        self, function: tuple[Any, list[tf.Tensor]], facts: Sequence[Fact]
    ) -> GraphPlan:
        """Returns the plan of a function that an op calls.

        Args:
            function: Its graph, and what it returns (_tf.copying.function_graph).
            facts: What is known of its inputs.
        """
        graph, outputs = function
        plan = GraphPlan(graph.inputs, facts, outputs=outputs)
        effects = [one for one in graph.get_operations() if has_effect(one)]
        self.extend(plan, [*effects, *(t.op for t in outputs)])
        return plan

    def extend(self, plan: GraphPlan, targets: Iterable[tf.Operation]) -> None:
        """Plans ops, and what they depend on.

        Raises:
            UnsupportedError: One belongs to control flow of TensorFlow 1, whose loops
                have no order.
        """
        inputs = {t.op for t in plan.inputs}

        def sources(op: tf.Operation) -> Iterable[tf.Operation]:
            functional.refuse_raw([op], _FIX)
            return [one for one in plan.before(op) if one not in inputs]

        for op in walk.in_order((op for op in targets if op not in inputs), sources):
            plan.twins.enter(op)
            self._plan(plan, op, self._seen(plan, op))

    def revise(self, plan: GraphPlan) -> None:
        """Plans those ops again of whose inputs something else is known by now."""
        for op, its in plan.plans.items():
            facts = self._seen(plan, op)
            is_same = self.own is None and all(map(operator.is_, facts, plan.seen[op]))
            if not is_same or self._has_whole(its):
                self._plan(plan, op, facts)

    def _plan(self, plan: GraphPlan, op: tf.Operation, facts: list[Fact]) -> None:
        its = plan.twins.plan(op, plan.plans) or decide(op, facts, self)
        plan.plans[op], plan.seen[op] = its, facts
        plan.know(op.outputs, its.makes)
        self.whole |= {
            plan.twins.first(t)
            for t, need in zip(op.inputs, its.needs, strict=True)
            if need == REPLICATED and isinstance(plan.fact(t).form, Partial)
        }

    def _seen(self, plan: GraphPlan, op: tf.Operation) -> list[Fact]:
        """Returns what an op is told of its inputs."""
        facts = [plan.fact(t) for t in op.inputs]
        if self.own is None or self.own.may_be_known(op):
            for k, t in enumerate(op.inputs):
                is_sum = isinstance(facts[k].form, Partial)
                if is_sum and plan.twins.first(t) in self.whole:
                    facts[k] = _WHOLE
        return facts

    def _has_whole(self, its: OpPlan) -> bool:
        """Whether functions that an op calls have sums that something needs whole."""
        return any(
            not self.whole.isdisjoint(body.facts)
            or any(map(self._has_whole, body.plans.values()))
            for body in its.bodies
        )


def has_effect(op: tf.Operation) -> bool:
    """Whether an op must run even if nothing uses its outputs."""
    is_random = op.type.startswith("Random")
    return copying.has_state(op) and op.type not in _ONLY_READ and not is_random


def is_of_program(op: tf.Operation) -> bool:
    """Whether an op, of no variable, runs in the program's process on whatever host.

    What has an effect, Python, files, datasets and other resources.
    """
    has_resource = any(t.dtype == tf.resource for t in [*op.inputs, *op.outputs])
    is_outside = op.type in ("ReadFile", "MatchingFiles", *PYTHON)
    return has_resource or is_outside or "Dataset" in op.type or has_effect(op)


_FIX = (
    "call tf.compat.v1.enable_control_flow_v2() before building it, or call what was "
    "made elsewhere in the input pipeline."
)


def decide(op: tf.Operation, facts: list[Fact], scope: Scope) -> OpPlan:
    """Returns the plan of an op, by its numbers or by its rule.

    Args:
        op: The op.
        facts: What is known of its inputs.
        scope: What else its rule may want to know.
    """
    if scope.own is not None:
        own = scope.own.plan(op, facts, scope, decide)
        if own is not None:
            return own
    numbers = evaluation.evaluate(op, facts)
    if numbers is not None:
        return _of_numbers(op, numbers)
    is_call = op.type not in RULES and copying.is_function(op)
    rule = RULES.get("PartitionedCall" if is_call else op.type)
    plan = rule(op, facts, scope) if rule else None
    if plan is None:
        plan = replicated(op, build=_once if copying.has_state(op) else None)
    kept = _kept_rows(op, facts, plan) if op.type in _KEEP_ROWS else None
    if kept is not None:
        return dataclasses.replace(plan, makes=[kept], build_local=stamped)
    has_local = any(map(sizes.has_local, plan.makes))
    if has_local and plan.build_local is None and not plan.bodies:
        return dataclasses.replace(plan, build_local=stamped)
    return plan


def _of_numbers(op: tf.Operation, numbers: Sequence[Any]) -> OpPlan:
    """Returns the plan of an op that computes small integers from shapes."""
    makes = [Fact(REPLICATED, one) for one in numbers]
    if any(map(sizes.has_local, makes)):
        if op.type not in ("Shape", "ShapeN", "Size"):
            return OpPlan([REPLICATED] * len(op.inputs), makes, build_local=stamped)

        def whole(replica: Any, op: tf.Operation, inputs: Any, local: Any) -> Any:
            of = replica.whole_sizes
            pairs = zip(makes, local, strict=True)
            return [functools.partial(of, fact.numbers, own) for fact, own in pairs]

        return OpPlan([AS_IS] * len(op.inputs), makes, whole, stamped)
    known = list(map(sizes.ints, makes))
    if None in known or op.type == "Const" or op.control_inputs:
        return OpPlan([REPLICATED] * len(op.inputs), makes)

    def constants(replica: Any, op: tf.Operation, inputs: Any) -> list[tf.Tensor]:
        made = zip(op.outputs, known, makes, strict=True)
        return [
            tf.constant(one, out.dtype, getattr(fact.numbers, "shape", None))
            for out, one, fact in made
        ]

    return OpPlan([UNUSED] * len(op.inputs), makes, constants)


def _kept_rows(op: tf.Operation, facts: list[Fact], plan: OpPlan) -> Fact | None:
    """Returns what is known of numbers of rows that an op only moves."""
    rows, columns, form = facts[0].rows, facts[0].columns, facts[0].form
    made = plan.makes[0].form
    if rows is None or not isinstance(made, Sharded) or not isinstance(form, Sharded):
        return None
    # Narrower types would change numbers, and those of other rows otherwise.
    is_exact = op.outputs[0].dtype in sizes.INTEGERS
    if made.layout is not form.layout or not is_exact:
        return None
    if op.type == "Pack":
        rank = op.outputs[0].shape.rank
        is_last = rank is not None and op.get_attr("axis") in (-1, rank - 1)
        # Locally, other row numbers would be counted from 0, too.
        is_pair = is_last and not columns and not any(map(sizes.has_local, facts[1:]))
        return Fact(made, rows=rows, columns=len(facts)) if is_pair else None
    if columns and op.type in ("Squeeze", "ExpandDims", "Reshape"):
        return None
    return Fact(made, rows=rows, columns=columns)


def _once(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[tf.Tensor]:
    return replica.once(op, inputs)
