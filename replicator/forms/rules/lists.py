# SPDX-License-Identifier: Apache-2.0
"""Rules of lists of tensors, and of optional values: their form is their elements'.

Loops keep lists for their results and for their gradients (TensorArray), conditionals
keep optional values. A list has no form until an element is put into it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.forms import sizes
from replicator.forms.forms import REPLICATED, UNSET, Fact, Sharded, Unset, common
from replicator.forms.rule import (
    AS_IS,
    Build,
    Need,
    OpPlan,
    about,
    plan,
    refused,
    rule,
)
from replicator.forms.sizes import elements, fitting


def _read(op: tf.Operation, facts: Sequence[Fact], at: int = -1) -> list[Need]:
    """Returns what is needed to read a list, given the shape of its elements there."""
    form, at = facts[0].form, at % len(facts)
    need: Need | None = None
    if isinstance(form, Sharded):
        need = fitting(elements(op.inputs[at], facts[at]), form)
    return [form, *[REPLICATED] * (at - 1), need or REPLICATED]


def _of_any_shape(at: int) -> Build:
    """Builds an op that makes a list, of elements of any shape.

    Args:
        at: Which input is the shape of the elements. In lists of sharded elements, it
            is of each replica's own; and before a list has elements, nothing says so.
    """

    def build(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> Any:
        inputs = [*inputs]
        inputs[at] = tf.constant(-1)
        return replica.stamp(op, inputs, shape_type=tf.int32)

    return build


@rule("EmptyTensorList TensorListReserve")
def empty(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Makes a list without elements, or to be filled."""
    if sizes.ints(facts[0]) is not None:
        return plan(op, [], UNSET)
    return plan(op, [AS_IS], UNSET, build=_of_any_shape(0))


def with_item(items: Fact, item: Fact) -> Fact:
    """Returns what is known of a list into which something is put.

    Args:
        items: What is known of the list so far.
        item: What is known of the element.
    """
    count = max(len(items.branches), len(item.branches))
    none = (Fact(UNSET),) * count  # of values that a conditional returns, per branch
    branches = map(with_item, items.branches or none, item.branches or none)
    form = common(items.form, item.form) or items.form
    return Fact(form, sizes.joined(items, item), branches=tuple(branches))


@rule("TensorListPushBack TensorListSetItem")
def put(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Puts an element into a list; the first one decides on the form."""
    made = with_item(facts[0], facts[-1])
    form = made.form
    if isinstance(form, Sharded) and not isinstance(facts[-1].form, Sharded):
        build = functools.partial(_put_own_rows, form=form)
        return plan(op, [form], [made], build=build)
    return OpPlan([form, *[REPLICATED] * (len(facts) - 2), form], [made])


def _put_own_rows(
    replica: Any, op: tf.Operation, inputs: Sequence[Any], *local: Any, form: Sharded
) -> list[tf.Tensor]:
    """Puts this replica's rows of a tensor, which must be as long as the others."""
    *items, x = inputs
    if form.factor is not None:
        want = replica.rows(form.layout) * form.factor
        text = "A list has elements of different numbers of rows, of which replicas "
        text += "have parts. Fix: keep them in a tf.Variable, or in several lists."
        check = tf.debugging.assert_equal(tf.shape(x)[form.axis], want, text)
        with tf.control_dependencies([check]):
            x = tf.identity(x)
    return replica.stamp(op, [*items, replica.convert(x, REPLICATED, form)])


@rule("TensorListGetItem TensorListPopBack")
def take(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Takes an element from a list."""
    if op.outputs[-1].dtype != tf.variant:
        _check_form(op, facts[0])
    return plan(op, _read(op, facts), [facts[0]] * len(op.outputs))


def _check_form(op: tf.Operation, fact: Fact) -> None:
    """Raises an error if what is read has another form in each branch.

    Raises:
        UnsupportedError: It has.
    """
    if isinstance(fact.form, Unset) and fact.branches:
        raise refused(
            op,
            f"{op.name} reads a list of tensors from a conditional, of which the "
            "replicas have parts in one branch, but not in the other.",
            "return a tensor from the conditional: stack the list inside.",
        )


@rule("TensorListStack TensorListGather")
def stack(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Makes a tensor of a list, along a new axis 0."""
    form = facts[0].form
    _check_form(op, facts[0])
    made = form.at(form.axis + 1) if isinstance(form, Sharded) else form
    made = REPLICATED if isinstance(made, Unset) else made
    return plan(op, _read(op, facts), made)


@rule("TensorListConcatV2")
def concatenate(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Makes a tensor of a list, along axis 0: batches become blocks."""
    form = facts[0].form
    _check_form(op, facts[0])
    if not isinstance(form, Sharded) or form.factor != 1 or form.axis:
        return None
    made = Sharded(0, form.layout, None, 1)

    def build(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[tf.Tensor]:
        own, lengths = replica.stamp(op, inputs)
        return [own, *replica.sums([lengths])]

    return plan(op, _read(op, facts, 1), [Fact(made), Fact()], build=build)


@rule("TensorListFromTensor TensorListScatter TensorListScatterV2")
def from_tensor(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Makes a list of a tensor's axis 0."""
    form, at = facts[0].form, 1 if op.type == "TensorListFromTensor" else 2
    is_cut = isinstance(form, Sharded) and form.axis == 0
    if is_cut or isinstance(form, Unset):
        return None
    made = form.at(form.axis - 1) if isinstance(form, Sharded) else form
    if sizes.ints(facts[at]) is not None:
        return plan(op, [form], made)
    needs = [form, *[REPLICATED] * (at - 1), AS_IS]
    return plan(op, needs, made, build=_of_any_shape(at))


@rule("TensorListResize")
def resize(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Makes a list longer or shorter."""
    return plan(op, [facts[0].form], [facts[0]])


@rule("OptionalNone")
def nothing(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan:
    """Makes an optional value that is missing."""
    return plan(op, [], UNSET)


@rule("OptionalFromValue OptionalGetValue")
def optional(op: tf.Operation, facts: list[Fact], scope: Any) -> OpPlan | None:
    """Makes an optional value of one tensor, or takes it."""
    if len(op.inputs) > 1 or len(op.outputs) > 1:
        return None
    form = facts[0].form
    made = Fact(form, facts[0].numbers, branches=facts[0].branches)
    if op.outputs[0].dtype != tf.variant:
        _check_form(op, facts[0])
    return OpPlan([form], [made])


rule("TensorListLength TensorListElementShape OptionalHasValue")(about)
