# SPDX-License-Identifier: Apache-2.0
"""Reads wait for no update, and updates for the reads of all replicas they concern."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import _tf
from replicator.autodist import freshness, marked
from replicator.autodist.program import Program
from tests.autodist.helpers import copied

v1 = tf.compat.v1
W = np.array([1.0, 2.0, 3.0], np.float32)


def _program(w: Any) -> dict[str, Any]:
    other = tf.Variable(W, name="other")
    read = w.read_value()
    update = w.assign_add(W, read_value=False)
    with tf.control_dependencies([update]):
        after = w.read_value()
    return {
        "read": read,
        "other": other.read_value(),
        "after": after,
        "update": update,
        "init": w.initializer,
    }


def _reads(tensor: tf.Tensor) -> tf.Operation:
    """Returns the read that a tensor is passed on from."""
    op = tensor.op
    while op.type != "ReadVariableOp":
        op = op.inputs[0].op
    return op


@pytest.mark.parametrize("is_shared", [True, False])
def test_updates_wait_for_the_reads_of_what_they_update(is_shared: bool) -> None:
    made = copied(_program, W, lambda found: [found["update"]] if is_shared else [], 3)
    found = made.fetches
    freshness.read_first(made.program, made.places)
    for r, own in enumerate(made.places):
        update = own[found["update"]]
        waits = [
            made.places.index(places)
            for places in made.places
            if places[_reads(found["read"])] in update.control_inputs
        ]
        # One that writes for all follows the reads of all, else those of its replica.
        assert waits == ([0, 1, 2] if is_shared else [r])
        assert own[_reads(found["other"])] not in update.control_inputs
        assert own[_reads(found["after"])] not in update.control_inputs
        assert update in own[_reads(found["after"])].control_inputs
        assert not own[found["init"]].control_inputs


def _assigned(make: Callable[[Any], Any]) -> Callable[[Any], tf.Operation]:
    return lambda w: w.assign(make(w), read_value=False)


def _momentum(w: Any) -> tf.Operation:
    slot = tf.Variable(W, name="slot")
    return tf.raw_ops.ResourceApplyMomentum(
        var=w.handle, accum=slot.handle, lr=0.1, grad=W, momentum=0.9
    )


UPDATES: dict[str, tuple[Callable[[Any], tf.Operation], bool]] = {
    "added": (lambda w: w.assign_add(W, read_value=False), True),
    "less": (lambda w: w.assign_sub(W, read_value=False), True),
    "by an optimizer": (_momentum, True),
    "rows": (
        lambda w: tf.raw_ops.ResourceScatterAdd(
            resource=w.handle, indices=[0], updates=[1.0]
        ),
        True,
    ),
    "computed of it": (_assigned(lambda w: 0.9 * tf.sqrt(w)), True),
    "computed of another": (_assigned(lambda w: tf.Variable(W, name="o") + 1), False),
    "a constant": (_assigned(lambda w: tf.constant(W)), False),
    "its initial value": (lambda w: w.initializer, False),
    "a read": (lambda w: _reads(w.read_value()), False),
    "the shape": (
        lambda w: tf.raw_ops.VariableShape(input=w.handle).op,
        False,
    ),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_what_depends_on_the_value_before(name: str) -> None:
    build, expected = UPDATES[name]
    made: list[Any] = []
    with tf.Graph().as_default() as graph:
        with tf.variable_creator_scope(marked.creator(made)):
            op = build(tf.Variable(W, name="w"))
    assert freshness.updates(Program(graph, made), op) == expected


@pytest.mark.parametrize("owner", [0, 2, None])
def test_an_owners_write_is_that_of_all(owner: int | None) -> None:
    made = copied(_program, W, num_replicas=3)
    update, after = made.fetches["update"], made.fetches["after"]
    before = made.of(update)
    named = []

    def owner_of(variable: Any) -> int | None:
        named.append(variable.op.name)
        return owner if variable.op.name == "w" else 0

    freshness.keep_owners_writes(made.program, made.places, owner_of)
    assert "w" in named
    if owner is None:
        assert made.of(update) == before
        return
    assert made.of(update) == [before[owner]] * 3
    for read in made.of(_reads(after).outputs[0]):
        assert before[owner] in read.op.control_inputs  # and for no other
        assert not set(before) - {before[owner]} & set(read.op.control_inputs)
    assert all(not _tf.control_outputs(op) for op in before if op is not before[owner])
