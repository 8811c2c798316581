# SPDX-License-Identifier: Apache-2.0
"""What a rule is: for one type of op, the forms of its inputs and of its outputs.

A rule is a function of an op and of what is known of its inputs. It only reads the
graph of the user, builds nothing, and returns an OpPlan, or None: the op then takes
replicated inputs, as do ops without a rule. A missing rule costs time, and never
changes a number. The rules are in rules/, by kinds of ops.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import frames
from replicator.forms.forms import REPLICATED, Fact, Form, Partial, Sharded


class Version(enum.Enum):
    """What an op takes of an input, other than a copy in some form.

    Attributes:
        LOCAL: The local version of numbers of rows, or of a shape (sizes.py).
        AS_IS: The copy as it was built, whatever its form.
        UNUSED: Nothing.
    """

    LOCAL = "local"
    AS_IS = "as it is"
    UNUSED = "unused"


LOCAL, AS_IS, UNUSED = Version.LOCAL, Version.AS_IS, Version.UNUSED
Need = Form | Version

# Builds an op of the replica that is being built: replica (replay.Replica), op, and its
# inputs in the forms that the plan asks for, None where UNUSED. Returns the outputs.
Build = Callable[..., Sequence[Any]]


@dataclasses.dataclass
class OpPlan:
    """What one op becomes on each replica.

    Attributes:
        needs: What the op takes of each input.
        makes: What is known of each output.
        build: Builds it; None: the same op.
        build_local: Builds the local versions of the outputs, where these have some.
            The outputs themselves are then built only if something needs them, and
            `build` is given the local versions as a last argument.
        bodies: The plans of the functions that the op calls (propagate.GraphPlan).
        reads: What `build` asks the replica for, besides the op's inputs.
    """

    needs: Sequence[Need]
    makes: Sequence[Fact]
    build: Build | None = None
    build_local: Build | None = None
    bodies: Sequence[Any] = ()
    reads: Sequence[tf.Tensor] = ()


# A function of an op, of what is known of its inputs, and of propagate.Scope.
Rule = Callable[[tf.Operation, list[Fact], Any], OpPlan | None]


RULES: dict[str, Rule] = {}  # of all types of ops, once rules/ is imported


def rule(types: str) -> Callable[[Rule], Rule]:
    """Decorates the rule of ops of these types, separated by spaces."""

    def enter(function: Rule) -> Rule:
        assert RULES.keys().isdisjoint(types.split()), types
        RULES.update(dict.fromkeys(types.split(), function))
        return function

    return enter


# A function of an op, of the form of its first input, which is Sharded, and of what is
# known of all inputs.
OfRows = Callable[[tf.Operation, Sharded, list[Fact]], OpPlan | None]


def of_rows(types: str, linear: bool = True) -> Callable[[OfRows], OfRows]:
    """Decorates the rule of ops that do something to the rows of their first input.

    Args:
        types: The types of the ops.
        linear: Whether they make a sum of a sum, if the other inputs are the same.
    """

    def enter(function: OfRows) -> OfRows:
        @rule(types)
        @functools.wraps(function)
        def its(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
            form = facts[0].form
            if isinstance(form, Sharded) and op.inputs[0].shape.rank is not None:
                return function(op, form, facts)
            return of_sums(op, facts) if linear else None

        return function

    return enter


def plan(
    op: tf.Operation, needs: Sequence[Need], made: Form | Sequence[Fact], **more: Any
) -> OpPlan:
    """Returns the plan of an op.

    Args:
        op: The op.
        needs: What it takes of its first inputs; the others are replicated.
        made: The form of all outputs, or what is known of each.
        **more: Attributes of the plan.
    """
    others = [REPLICATED] * (len(op.inputs) - len(needs))
    makes = made if isinstance(made, Sequence) else [Fact(made)] * len(op.outputs)
    return OpPlan([*needs, *others], makes, **more)


def stamped(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> Sequence[Any]:
    """Builds the op itself."""
    made: Sequence[Any] = replica.stamp(op, inputs)
    return made


def passed_on(op: tf.Operation, made: Fact) -> OpPlan:
    """Returns the plan of an op whose first input is its output, as it is."""
    needs = [made.form, *[UNUSED] * (len(op.inputs) - 1)]
    return OpPlan(needs, [made], build=lambda replica, op, inputs: inputs[:1])


def replicated(op: tf.Operation, **more: Any) -> OpPlan:
    """Returns the plan of an op that takes and makes values of one device."""
    return plan(op, [], REPLICATED, **more)


def is_partial(fact: Fact, how: str | None = None) -> bool:
    """Whether a tensor is still to be combined, in this way or in any."""
    return isinstance(fact.form, Partial) and how in (None, fact.form.how)


def refused(op: tf.Operation, problem: str, fix: str) -> errors.UnsupportedError:
    """Returns the error of an op that replicas cannot have, with the user's line."""
    line = f"at {errors.innermost(frames.user_frames(op))}"
    return errors.UnsupportedError(problem, [line], fix)


def about(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """The rule of ops that say what is the same of all copies, whatever their form."""
    return plan(op, [AS_IS], REPLICATED)


def of_sums(
    op: tf.Operation, facts: list[Fact], places: Container[int] = (0,)
) -> OpPlan | None:
    """Returns the plan of an op whose result is a sum, as some of its inputs are.

    Args:
        op: The op.
        facts: What is known of its inputs.
        places: Of the inputs in which, together, it is linear. Those of them that are
            no sums become some: the summands of all replicas but one are zeros.
    """
    partial = [k for k, fact in enumerate(facts) if is_partial(fact)]
    are_fit = all(k in places and is_partial(facts[k], "sum") for k in partial)
    if not partial or not are_fit:
        return None
    needs = [Partial() if k in places else REPLICATED for k in range(len(facts))]
    return plan(op, needs, Partial())
