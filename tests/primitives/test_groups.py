# SPDX-License-Identifier: Apache-2.0
"""Groups: some of the replicas communicate, as if there were no others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests import helpers


def _slices(x: tf.Tensor) -> tf.IndexedSlices:
    return tf.IndexedSlices(x, tf.constant([0, 2]), tf.constant([3, 3]))


# Each takes a replicator, a tensor, the group and the ids of its replicas.
CALLS: dict[str, Callable[..., tf.Tensor]] = {
    "sum": lambda repl, x, g, ids: repl.all_reduce(x, group=g),
    "mean": lambda repl, x, g, ids: repl.all_reduce(x, "mean", group=g),
    "max": lambda repl, x, g, ids: repl.all_reduce(x, "max", group=g),
    "prod": lambda repl, x, g, ids: repl.all_reduce(x, "prod", group=g),
    "argmin": lambda repl, x, g, ids: repl.all_reduce(x, "argmin", group=g).value,
    "weighted": lambda repl, x, g, ids: repl.all_reduce(
        x, "mean", weight=1 + ids.index(repl.replica_id), group=g
    ),
    "sparse": lambda repl, x, g, ids: tf.convert_to_tensor(
        repl.all_reduce(_slices(x), "mean", group=g)
    ),
    "broadcast": lambda repl, x, g, ids: repl.broadcast(x, ids[-1], group=g),
    "stack": lambda repl, x, g, ids: repl.all_gather(x, group=g),
    "concat": lambda repl, x, g, ids: repl.all_gather(x, 0, group=g),
}


def _derivatives(
    call: Callable[[tf.Tensor], tf.Tensor], value: np.ndarray, place: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns a call's result, and the first two derivatives of a loss."""
    x = helpers.opaque(value)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x)
            loss = (place + 1.0) * tf.reduce_sum(tf.sin(y) * y)
        first = tape.gradient(loss, x)
        slope = tf.reduce_sum(first * tf.cos(tf.stop_gradient(x)))
    return y, first, outer.gradient(slope, x)


def _values(num_replicas: int) -> np.ndarray:
    return np.random.RandomState(num_replicas).randn(num_replicas, 2, 3)


@functools.cache
def _alone(name: str, members: tuple[int, ...], num_replicas: int) -> Any:
    """Returns the results of members as the only replicas, by group member."""
    repl = helpers.make(len(members))

    def step() -> Any:
        r = repl.replica_id
        everyone = range(len(members))
        call = functools.partial(CALLS[name], repl, g=None, ids=everyone)
        return _derivatives(call, _values(num_replicas)[members[r]], r)

    columns = helpers.run("eager", repl, lambda: step)
    return list(zip(*columns, strict=True))


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("mode", "count"), [("function", 3), ("session", 3), ("eager", 1)]
)
@pytest.mark.parametrize("name", CALLS)
def test_a_group_is_as_a_smaller_world(name: str, mode: str, count: int) -> None:
    """Values, first and second derivatives; no two groups have the same size.

    Or only one group communicates, and the other replicas do nothing.
    """
    ids = [(3,), (1, 4), (0, 2, 5)][3 - count :]
    repl = helpers.make(6)
    parts = repl.groups(ids) if count == 3 else repl.group(ids[0])

    def step() -> Any:
        r = repl.replica_id
        own = parts.own if count == 3 else parts
        if r not in own:
            return [tf.constant(0.0, tf.float64)] * 3
        call = functools.partial(CALLS[name], repl, g=parts, ids=own.members)
        return list(_derivatives(call, _values(6)[r], own.index(r)))

    columns = helpers.run(mode, repl, lambda: step)
    for group in ids:
        for r, want in zip(group, _alone(name, group, 6), strict=True):
            for column, part in zip(columns, want, strict=True):
                np.testing.assert_allclose(column[r], part, rtol=1e-12)


# --- Order ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", helpers.MODES)
def test_order_is_kept_per_group(mode: str) -> None:
    """Overlapping groups; replica 1 calls the right one first, replica 2 the left."""
    repl = helpers.make(3)

    def step() -> Any:
        r = repl.replica_id
        x = helpers.opaque(10.0**r)
        left, right = repl.group([0, 1]), repl.group([1, 2])
        total = repl.all_reduce(x)
        if r == 0:
            a = [repl.all_reduce(x, group=left), repl.all_reduce(2 * x, group=left)]
        elif r == 1:
            b = repl.all_reduce(x, group=right)
            a = [repl.all_reduce(x, group=left), b]
            a[1] += repl.all_reduce(2 * x, group=left)
        else:
            a = [total, repl.all_reduce(x, group=right)]
        return *a, repl.all_reduce(x, "max")

    one, two, top = helpers.run(mode, repl, lambda: step)
    assert [float(v) for v in one] == [11, 11, 111]
    assert [float(v) for v in two] == [22, 132, 110]
    assert [float(v) for v in top] == [100] * 3


def test_groups_may_take_different_branches() -> None:
    repl = helpers.make(4)
    halves = repl.groups([[0, 2], [1, 3]])

    def step() -> tf.Tensor:
        r = repl.replica_id
        x = helpers.opaque(r + 1.0)
        return tf.cond(
            helpers.opaque(r % 2 == 0),
            lambda: repl.all_reduce(x, group=halves),
            lambda: repl.all_reduce(x, "prod", group=halves),
        )

    assert [float(v) for v in repl.run(step)] == [4.0, 8.0, 4.0, 8.0]


def test_a_group_of_all_is_no_group() -> None:
    repl = helpers.make(2)
    everyone = [None, [1, 0], repl.group([0, 1]), repl.groups([[0, 1]]), range(2)]

    def step() -> Any:
        r = repl.replica_id
        pairs = zip(everyone, reversed(everyone), strict=True)
        return [repl.all_reduce(1.0, group=pair[r]) for pair in pairs]

    for total in repl.run(step):
        assert [float(v) for v in total] == [2.0, 2.0]


# --- Group objects --------------------------------------------------------------------


def test_a_group_is_a_set_of_replicas() -> None:
    group = helpers.make(4).group([2, 0])
    assert repr(group) == "Group([0, 2])"
    assert (len(group), list(group), group.members) == (2, [0, 2], (0, 2))
    assert 2 in group and 1 not in group
    assert group.index(2) == 1
    assert group == helpers.make(3).group({0, 2})
    assert len({group, helpers.make(4).group(range(0, 4, 2))}) == 1
    assert isinstance(group, replicator.Group)


def test_a_partition_knows_the_group_of_each_replica() -> None:
    repl = helpers.make(3)
    halves = repl.groups([[2, 0], repl.group([1])])
    assert repr(halves) == "Partition([[0, 2], [1]])"
    assert halves.groups == (repl.group([0, 2]), repl.group([1]))
    assert isinstance(halves, replicator.Partition)
    owns = []

    def step() -> tf.Tensor:
        owns.append(halves.own)
        assert repl.replica_id in halves.own
        return tf.constant(0)

    repl.run(step)
    assert owns == [halves.groups[0], halves.groups[1], halves.groups[0]]


# --- Errors ---------------------------------------------------------------------------


def _left_out(repl: replicator.Replicator) -> None:
    repl.all_reduce(1.0)
    if repl.replica_id == 0:
        repl.all_reduce(1.0, group=[0, 2])


def _another_group(repl: replicator.Replicator) -> None:
    if repl.replica_id < 2:
        repl.all_reduce(1.0, group=[0, 1] if repl.replica_id else None)


def _another_op(repl: replicator.Replicator) -> None:
    if repl.replica_id:
        repl.all_reduce(1.0, ["sum", "max"][repl.replica_id - 1], group=[1, 2])


def _in_opposite_orders(repl: replicator.Replicator) -> None:
    groups = [[0, 1], None] if repl.replica_id < 2 else [None]
    for group in groups if repl.replica_id else groups[::-1]:
        repl.all_reduce(1.0, group=group)


@pytest.mark.parametrize(
    ("step", "error", "texts"),
    [
        (
            _left_out,
            errors.MismatchError,
            r"call 0 of group \[0, 2\] of replica 0 has no partner((?!replica 1).)*"
            r"replica 2: 0 calls((?!replica 1).)*$",
        ),
        (
            _another_group,
            errors.MismatchError,
            "call 0 of replica 0 has no partner.*replica 1: 0 calls",
        ),
        (
            _another_op,
            errors.MismatchError,
            r"call 0 of group \[1, 2\] differs between replicas.*not the same op",
        ),
        (
            _in_opposite_orders,
            errors.DeadlockError,
            r"replica 0.*test_groups\.py:.*replica 1.*test_groups\.py:",
        ),
    ],
)
def test_the_error_names_the_group(step: Any, error: Any, texts: str) -> None:
    repl = helpers.make(3)
    with pytest.raises(error, match=rf"(?s){texts}"):
        repl.run(lambda: step(repl) and None)
