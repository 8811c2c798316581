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


@pytest.mark.battery(10)
@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.parametrize("name", CALLS)
def test_a_partition_is_as_several_smaller_worlds(name: str, mode: str) -> None:
    """Values, first and second derivatives; no two groups have the same size."""
    ids = [(3,), (1, 4), (0, 2, 5)]
    repl = helpers.make(6)
    parts = repl.groups(ids)

    def step() -> Any:
        r, own = repl.replica_id, parts.own
        call = functools.partial(CALLS[name], repl, g=parts, ids=own.members)
        return _derivatives(call, _values(6)[r], own.index(r))

    columns = helpers.run(mode, repl, lambda: step)
    for group in ids:
        for r, want in zip(group, _alone(name, group, 6), strict=True):
            for column, part in zip(columns, want, strict=True):
                np.testing.assert_allclose(column[r], part, rtol=1e-12)


@pytest.mark.battery(5)
@pytest.mark.parametrize("name", CALLS)
def test_those_outside_a_group_do_nothing(name: str) -> None:
    repl = helpers.make(4)
    group = repl.group([3, 1])

    def step() -> Any:
        r = repl.replica_id
        if r not in group:
            return [tf.constant(0.0, tf.float64)] * 3
        call = functools.partial(CALLS[name], repl, g=group, ids=group.members)
        return list(_derivatives(call, _values(4)[r], group.index(r)))

    columns = repl.run(step)
    for r, want in zip([1, 3], _alone(name, (1, 3), 4), strict=True):
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


@pytest.mark.parametrize("mode", helpers.MODES)
def test_groups_may_make_different_numbers_of_calls(mode: str) -> None:
    repl = helpers.make(4)
    halves = repl.groups([[0, 1], [2, 3]])

    def step() -> tf.Tensor:
        x = helpers.opaque(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(1 if 0 in halves.own else 4):
                y = repl.all_reduce(y, group=halves)
            y = repl.all_reduce(y)
        return y, tape.gradient(y, x)

    y, d = helpers.run(mode, repl, lambda: step)
    assert [float(v) for v in y] == [36.0] * 4
    assert [float(v) for v in d] == [8.0, 8.0, 64.0, 64.0]


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("static", [True, False])
def test_groups_may_take_different_numbers_of_turns(static: bool, mode: str) -> None:
    repl = helpers.make(4)
    halves = repl.groups([[0, 2], [1, 3]])
    turns = [3, 5]

    def step() -> Any:
        turn = turns[repl.replica_id % 2]
        count = turn if static else helpers.opaque(turn)
        x = helpers.opaque(np.float64(repl.replica_id + 1))
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(
                lambda k, y: k < count,
                lambda k, y: (k + 1, repl.all_reduce(y, "mean", group=halves) * 2.0),
                [tf.constant(0), x],
            )
        return y, tape.gradient(y, x)

    y, d = helpers.run(mode, repl, lambda: step)
    np.testing.assert_allclose(y, [2.0 * 8, 3.0 * 32, 2.0 * 8, 3.0 * 32])
    np.testing.assert_allclose(d, [8.0, 32.0, 8.0, 32.0])


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


def test_partitions_of_a_partition() -> None:
    """Rows and columns of a grid of replicas: a sum of sums is the sum."""
    repl = helpers.make(6)
    rows = repl.groups([[0, 1, 2], [3, 4, 5]])
    columns = repl.groups([[0, 3], [1, 4], [2, 5]])

    def step() -> tf.Tensor:
        x = helpers.opaque(2.0**repl.replica_id)
        return repl.all_reduce(repl.all_reduce(x, group=rows), group=columns)

    assert [float(v) for v in repl.run(step)] == [63.0] * 6


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

MADE_BADLY = {
    "no list": (lambda r: r.group(2), "group was given 2 as a group", "[0, 2]"),
    "text": (lambda r: r.group("02"), "group was given '02' as a group", "[0, 2]"),
    "empty": (lambda r: r.group([]), r"group was given [] as a group", "each once"),
    "twice": (lambda r: r.group([1, 1]), "given [1, 1] as a group", "each once"),
    "unknown": (lambda r: r.group([0, 3]), "member=3, but there are 3", "member < 3"),
    "negative": (lambda r: r.group([-1]), "group was given member=-1", "0 <= member"),
    "bool": (lambda r: r.group([True]), "was given member=True", "a Python int"),
    "tensor": (
        lambda r: r.group([tf.constant(1)]),
        "was given member=<tf.Tensor",
        "a Python int",
    ),
    "flat": (lambda r: r.groups([0, 1, 2]), "groups was given 0 as a group", "[0, 2]"),
    "number": (lambda r: r.groups(3), "groups was given 3", "[[0, 1], [2, 3]]"),
    "part": (lambda r: r.groups([[0, 1]]), "given [[0, 1]]", "each of the 3 replicas"),
    "overlap": (
        lambda r: r.groups([[0, 1], [1, 2]]),
        "groups was given [[0, 1], [1, 2]]",
        "exactly one group",
    ),
}


@pytest.mark.parametrize("name", MADE_BADLY)
def test_groups_without_meaning_are_refused(name: str) -> None:
    make, message, fix = MADE_BADLY[name]
    with pytest.raises(errors.ArgumentError) as raised:
        make(helpers.make(3))
    problem, site, last = str(raised.value).split("\n")
    assert message in problem
    assert "at tests" in site and "test_groups.py:" in site
    assert last.startswith("Fix: ") and fix in last


USED_BADLY: dict[str, Any] = {
    "not a member": ([1, 2], "the group [1, 2], in which it is not", "repl.replica_id"),
    "no group": ("all", "was given 'all' as a group", "[0, 2]"),
    "a larger world": (
        lambda: helpers.make(4).group([0, 3]),
        "was given member=3, but there are 3 replicas",
        "0 <= member < 3",
    ),
    "a partition of a larger world": (
        lambda: helpers.make(4).groups([[0, 1], [2, 3]]),
        "was given Partition([[0, 1], [2, 3]]), but there are 3 replicas",
        "with `groups` of the Replicator that runs the step",
    ),
    "a partition of a smaller world": (
        lambda: helpers.make(2).groups([[1], [0]]),
        "was given Partition([[1], [0]]), but there are 3 replicas",
        "with `groups` of the Replicator that runs the step",
    ),
}
PRIMITIVES = {
    "all_reduce": lambda repl, group: repl.all_reduce(1.0, group=group),
    "broadcast": lambda repl, group: repl.broadcast(1.0, group=group),
    "all_gather": lambda repl, group: repl.all_gather(1.0, group=group),
    "all_gather_object": lambda repl, group: repl.all_gather_object(1, group=group),
    "broadcast_object": lambda repl, group: repl.broadcast_object(1, group=group),
}


@pytest.mark.parametrize("primitive", PRIMITIVES)
@pytest.mark.parametrize("name", USED_BADLY)
def test_calls_in_wrong_groups_are_refused(name: str, primitive: str) -> None:
    make, message, fix = USED_BADLY[name]
    group = make() if callable(make) else make
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        PRIMITIVES[primitive](repl, group)
        return tf.constant(0)

    with pytest.raises(errors.ArgumentError) as raised:
        repl.run(step)
    text = str(raised.value)
    assert f"{primitive} on replica 0 " in text
    assert message in text and "test_groups.py:" in text
    assert fix in text.partition("Fix: ")[2]


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_groups_outside_a_step(primitive: str) -> None:
    repl = helpers.make(2)
    for group in (repl.group([0, 1]), repl.groups([[0], [1]])):
        with pytest.raises(
            replicator.ContextError, match=f"^{primitive} was called outside a step"
        ):
            PRIMITIVES[primitive](repl, group)


def test_the_own_group_outside_a_step() -> None:
    halves = helpers.make(2).groups([[0], [1]])
    with pytest.raises(
        replicator.ContextError, match=r"^Partition\.own was called outside a step"
    ):
        _ = halves.own


def test_a_root_outside_the_group() -> None:
    repl = helpers.make(3)
    with pytest.raises(
        errors.ArgumentError,
        match=r"(?s)broadcast on replica 0 was given root=1, which is not in the group "
        r"\[0, 2\].*Fix: pass the id of a replica in the group as root",
    ):
        repl.run(lambda: repl.broadcast(1.0, 1, group=[0, 2]))


def _fails(step: Callable[[replicator.Replicator], Any], error: Any) -> str:
    repl = helpers.make(3)

    def run() -> tf.Tensor:
        step(repl)
        return tf.constant(0)

    with pytest.raises(error) as raised:
        repl.run(run)
    return str(raised.value)


def test_a_group_that_a_member_does_not_call() -> None:
    def step(repl: replicator.Replicator) -> None:
        repl.all_reduce(1.0)
        if repl.replica_id == 0:
            repl.all_reduce(1.0, group=[0, 2])

    text = _fails(step, replicator.MismatchError)
    assert "Communication call 0 of group [0, 2] of replica 0 has no partner" in text
    assert "replica 2: 0 calls" in text
    assert "replica 1" not in text


def test_replicas_with_different_groups() -> None:
    def step(repl: replicator.Replicator) -> None:
        if repl.replica_id < 2:
            repl.all_reduce(1.0, group=[0, 1] if repl.replica_id else None)

    text = _fails(step, replicator.MismatchError)
    assert "Communication call 0 of replica 0 has no partner" in text
    assert "replica 1: 0 calls" in text


def test_calls_of_a_group_that_differ() -> None:
    def step(repl: replicator.Replicator) -> None:
        if repl.replica_id:
            op = ["sum", "max"][repl.replica_id - 1]
            repl.all_reduce(1.0, op, group=[1, 2])

    text = _fails(step, replicator.MismatchError)
    assert "Communication call 0 of group [1, 2] differs between replicas" in text
    assert "not the same op" in text


def test_groups_called_in_opposite_orders_wait_for_one_another() -> None:
    def step(repl: replicator.Replicator) -> None:
        if repl.replica_id < 2:
            groups = [[0, 1], None]
            for group in groups if repl.replica_id else groups[::-1]:
                repl.all_reduce(1.0, group=group)
        else:
            repl.all_reduce(1.0)

    text = _fails(step, replicator.DeadlockError)
    assert text.count("test_groups.py:") >= 2
    assert "replica 0" in text and "replica 1" in text
