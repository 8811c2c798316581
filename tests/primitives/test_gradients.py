# SPDX-License-Identifier: Apache-2.0
"""A gradient is that of the sum of all replicas' losses, however it is taken.

A tape or tf.gradients only visits what the replica's own loss depends on: `linked`
makes a loss depend on what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

Loss = Callable[[Any, tf.Tensor], tf.Tensor]


def _cube_of_what_came(repl: Any, x: tf.Tensor, tag: int = 0) -> tf.Tensor:
    """Replica 0 sends x, replica 1 has the loss x0^3 * x1."""
    if repl.replica_id == 0:
        repl.send(x, 1, tag=tag)
        return repl.linked(0.0)
    return repl.recv(x, 0, tag=tag) ** 3 * x


def _in_other_orders(repl: Any, x: tf.Tensor) -> tf.Tensor:
    """The order of use determines the order in which gradients are built."""
    a, b = repl.all_reduce(x[0]), repl.all_reduce(x[1])
    return 3 * a + 7 * b if repl.replica_id == 0 else 7 * b + 3 * a


def _function_called_twice(repl: Any, x: tf.Tensor) -> tf.Tensor:
    total = tf.function(lambda x: repl.all_reduce(x))
    a, b = total(x[0]), total(x[1])
    return 3 * a + 7 * b if repl.replica_id == 0 else 7 * b + 3 * a


def _apart(repl: Any, x: tf.Tensor) -> tf.Tensor:
    total = repl.all_reduce(x) + repl.all_reduce(x**2)
    return total + repl.broadcast(x) + tf.reduce_sum(repl.all_gather(x))


def _one_nest(repl: Any, x: tf.Tensor) -> tf.Tensor:
    a, b = repl.all_reduce([x, x**2])
    return a + b + repl.broadcast(x) + tf.reduce_sum(repl.all_gather(x))


def _with_a_gradient_of_its_own(repl: Any, x: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def reduced(x: tf.Tensor) -> Any:
        return repl.all_reduce(x), lambda d: repl.all_reduce(d, "max") * 10.0

    return (repl.replica_id + 1.0) * reduced(x**2)


def _slices_of_a_gradient(repl: Any, x: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def lookup(table: tf.Tensor) -> Any:
        def backward(d: tf.Tensor) -> tf.IndexedSlices:
            return tf.IndexedSlices(d, tf.constant([1]), tf.constant([3]))

        return table[1:2], backward

    return tf.reduce_sum(lookup(repl.all_reduce(x)))


def _leaf_of_integers(repl: Any, x: tf.Tensor) -> tf.Tensor:
    n, y, _ = repl.broadcast((tf.constant(3), x, "x"), root=1)
    return y * tf.cast(n, tf.float32)


def _scattered(repl: Any, x: tf.Tensor) -> tf.Tensor:
    n, y = repl.scatter((tf.constant([3, 5]), x), root=1)
    return y * tf.cast(n, tf.float32)


def _permuted(repl: Any, x: tf.Tensor) -> tf.Tensor:
    _, y = repl.permute((tf.constant(1), x), [(0, 2), (1, 1)])
    return (repl.replica_id + 1.0) * y


def _like_what_is_to_come(repl: Any, x: tf.Tensor) -> tf.Tensor:
    y = repl.broadcast(x**2 if repl.replica_id == 2 else x, root=2)
    return (repl.replica_id + 1.0) * y


def _extrema(repl: Any, x: tf.Tensor) -> tf.Tensor:
    """An integer leaf beside them has no gradient and removes none."""
    n = helpers.opaque(repl.replica_id)
    _, (value, owner), (number, _) = repl.all_reduce([n, x, x[0]], "argmax")
    loss = (repl.replica_id + 1.0) * tf.reduce_sum(value * [1.0, 10.0, 100.0])
    return loss + number + tf.reduce_sum(tf.cast(owner, tf.float32))


def _between_barriers(repl: Any, x: tf.Tensor) -> tf.Tensor:
    repl.barrier()
    y = repl.all_reduce(x) ** 2
    repl.barrier()
    return y


def _calls_of_halves(repl: Any, x: tf.Tensor) -> tf.Tensor:
    """One group makes one call, the other four."""
    halves = repl.groups([[0, 1], [2, 3]])
    for _ in range(1 if 0 in halves.own else 4):
        x = repl.all_reduce(x, group=halves)
    return repl.all_reduce(x)


def _turns_of_halves(repl: Any, x: tf.Tensor, static: bool = False) -> tf.Tensor:
    halves = repl.groups([[0, 2], [1, 3]])
    turns = [3, 5][repl.replica_id % 2]
    count = turns if static else helpers.opaque(turns)
    return tf.while_loop(
        lambda k, y: k < count,
        lambda k, y: (k + 1, repl.all_reduce(y, "mean", group=halves) * 2.0),
        [tf.constant(0), x],
    )[1]


def _unused_by_the_root(repl: Any, x: tf.Tensor) -> tf.Tensor:
    repl.reduce(x)  # then no replica differentiates the call
    return x**2


def _two_messages(repl: Any, x: tf.Tensor) -> tf.Tensor:
    if repl.replica_id > 0:
        return repl.recv(x, 0) * repl.replica_id
    repl.send(x**2, 1)
    repl.send(x, 2)
    return repl.linked(x)


def _sent_after_the_link(repl: Any, x: tf.Tensor) -> tf.Tensor:
    if repl.replica_id:
        repl.recv(tf.TensorSpec([]), 0)
        return x
    loss = repl.linked(x)
    repl.send(x, 1)
    return loss


def _neither_linked_nor_watched(repl: Any, x: tf.Tensor) -> tf.Tensor:
    if repl.replica_id:
        return x * repl.recv(tf.TensorSpec([]), 0)
    repl.send(x, 1)
    return x


def _outside_and_inside_of_a_function(repl: Any, x: tf.Tensor) -> tf.Tensor:
    """A message sent outside is linked inside too; its gradient comes back once."""
    outside = _cube_of_what_came(repl, x, tag=1)
    inner = tf.function(lambda: _cube_of_what_came(repl, x, tag=2))
    return repl.linked(outside + inner())


def _in_a_branch(repl: Any, x: tf.Tensor) -> tf.Tensor:
    yes = helpers.opaque(True)
    return tf.cond(yes, lambda: _cube_of_what_came(repl, x), lambda: x)


def _in_a_loop(repl: Any, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda k, _: k < helpers.opaque(3),
        lambda k, total: (k + 1, total + _cube_of_what_came(repl, x)),
        (0, 0.0),
    )[1]


def _sent_integers(repl: Any, x: tf.Tensor) -> tf.Tensor:
    n = tf.cast(x, tf.int32)
    if repl.replica_id:
        return x * tf.cast(repl.recv(n, 0), tf.float32)
    repl.send(n, 1)
    return repl.linked(x)


def _sent_nest(repl: Any, x: tf.Tensor) -> tf.Tensor:
    if repl.replica_id == 0:
        repl.send({"x": x, "n": tf.constant(3), "y": x * 2.0}, 1)
        return repl.linked(tf.reduce_sum(x))
    got = repl.recv({"x": x, "n": tf.constant(0), "y": tf.TensorSpec([2])}, 0)
    return got["x"] ** 3 * tf.cast(got["n"], tf.float32) + got["y"]


# The replicas' tensors, the loss, and what it gives each of them.
LOSSES: dict[str, tuple[Sequence[Any], Loss, Sequence[Any]]] = {
    "other orders": ([[1.0, 2.0]] * 3, _in_other_orders, [[9.0, 21.0]] * 3),
    "called twice": ([[1.0, 2.0]] * 2, _function_called_twice, [[6.0, 14.0]] * 2),
    # 2 * (1 + 2x + 1), and 2 more for the root of the broadcast.
    "several": ([2.0, 5.0], _apart, [14.0, 24.0]),
    "several in a nest": ([2.0, 5.0], _one_nest, [14.0, 24.0]),
    "a factor of 0": (
        [3.0, 3.0],
        lambda repl, x: repl.all_reduce(x) ** 2 * float(repl.replica_id),
        [12.0, 12.0],
    ),
    "stopped behind": (
        [3.0, 3.0],
        lambda repl, x: tf.stop_gradient(repl.all_reduce(x)) * x,
        [6.0, 6.0],
    ),
    "stopped before": (
        [3.0, 3.0],
        lambda repl, x: repl.all_reduce(tf.stop_gradient(x)) * x,
        [6.0, 6.0],
    ),
    "custom": ([1.0, 2.0], _with_a_gradient_of_its_own, [40.0, 80.0]),
    "custom slices": ([[1.0] * 3] * 2, _slices_of_a_gradient, [[0.0, 2.0, 0.0]] * 2),
    "leaf of integers": ([2.0, 2.0], _leaf_of_integers, [0.0, 6.0]),
    "scattered": ([[2.0, 3.0]] * 2, _scattered, [[0.0, 0.0], [3.0, 5.0]]),
    "permuted": ([3.0] * 3, _permuted, [3.0, 2.0, 0.0]),
    "like what comes": ([5.0] * 3, _like_what_is_to_come, [0.0, 0.0, 60.0]),
    "extrema": (
        [[1.0, 5.0, 2.0], [4.0, 5.0, 2.0], [4.0, 0.0, 3.0]],
        _extrema,
        [[0.0, 60.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 600.0]],
    ),
    "barriers": ([1.0, 2.0], _between_barriers, [12.0, 12.0]),
    "calls of halves": ([1.0] * 4, _calls_of_halves, [8.0, 8.0, 64.0, 64.0]),
    "turns of halves": ([1.0] * 4, _turns_of_halves, [8.0, 32.0] * 2),
    "static turns of halves": (
        [1.0] * 4,
        lambda repl, x: _turns_of_halves(repl, x, static=True),
        [8.0, 32.0] * 2,
    ),
    "unused reduce": ([3.0, 3.0], _unused_by_the_root, [6.0, 6.0]),
    "nothing sent": (
        [2.0, 5.0],
        lambda repl, x: repl.linked(repl.linked(x**2)),
        [4.0, 10.0],
    ),
    "message": ([2.0, 5.0], _cube_of_what_came, [60.0, 8.0]),
    "message and own": (
        [2.0, 5.0],
        lambda repl, x: _cube_of_what_came(repl, x) + x**2,
        [64.0, 18.0],
    ),
    # What comes back is scaled by the replica whose loss it is of.
    "scaled message": (
        [2.0, 5.0],
        lambda repl, x: _cube_of_what_came(repl, x) * [100.0, 2.0][repl.replica_id],
        [120.0, 16.0],
    ),
    "two messages": ([3.0] * 3, _two_messages, [9.0, 0.0, 0.0]),
    "sent after the link": ([3.0] * 2, _sent_after_the_link, [1.0, 1.0]),
    "neither linked nor watched": ([2.0] * 2, _neither_linked_nor_watched, [1.0, 2.0]),
    "outside and inside": (
        [2.0, 5.0],
        _outside_and_inside_of_a_function,
        [120.0, 16.0],
    ),
    "in a branch": ([2.0, 5.0], _in_a_branch, [60.0, 8.0]),
    "in a loop": ([2.0, 5.0], _in_a_loop, [180.0, 24.0]),
    "sent integers": ([2.0, 2.0], _sent_integers, [1.0, 2.0]),
    # A tensor that is passed in place of a spec gets zeros.
    "sent nest": ([[1.0, 2.0]] * 2, _sent_nest, [[12.0, 39.0], [0.0, 0.0]]),
}


def _by_tape(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = loss()
    return tape.gradient(value, x, unconnected_gradients="zero")


def _by_graph(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.gradients(loss(), x, unconnected_gradients="zero")[0]


def _by_nested_function(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
    """All of it is in a function, its gradients as well."""
    return tf.function(lambda: _by_tape(x, loss))()


def _of_nested_function(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
    """The tape is outside of the function that communicates and links."""
    return _by_tape(x, tf.function(loss))


def _twice(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        value = loss()
    both = [tape.gradient(value, x, unconnected_gradients="zero") for _ in range(2)]
    return tf.add_n(both) / 2.0


HOW = [_by_tape, _by_graph, _by_nested_function, _of_nested_function, _twice]
# Each loss in one way, in turn; all of them in long runs.
CASES = [
    pytest.param(
        *(name, how, mode),
        marks=[]
        if k % 15 == (5 * n + 3 * h) % 15 or name == "message"
        else pytest.mark.slow,
        id=f"{name}-{how.__name__[1:]}-{mode}",
    )
    for k, name in enumerate(LOSSES)
    for h, how in enumerate(HOW)
    for n, mode in enumerate(helpers.MODES)
]


@pytest.mark.parametrize(("name", "how", "mode"), CASES)
def test_it_is_that_of_all_losses(name: str, how: Any, mode: str) -> None:
    values, loss, want = LOSSES[name]
    repl = helpers.make(len(values))

    def step() -> tf.Tensor:
        x = helpers.opaque(tf.constant(values)[repl.replica_id])
        return how(x, lambda: loss(repl, x))

    np.testing.assert_array_equal(helpers.run(mode, repl, lambda: step), want)


# --- Second derivatives ---------------------------------------------------------------


def _reduced(repl: Any, x: tf.Tensor, op: str) -> tf.Tensor:
    """The gradient of the root's loss is a constant there, and is still sent to all."""
    y = repl.reduce(x + repl.replica_id, 0, op)
    y = tf.zeros([]) if y is None else y.value if "arg" in op else y
    return tf.reduce_sum(y)


def _gathered(repl: Any, x: tf.Tensor) -> tf.Tensor:
    y = repl.gather(x, 1, axis=0)
    return tf.reduce_sum(tf.zeros([]) if y is None else y)


def _powers_in_other_orders(repl: Any, x: tf.Tensor) -> tf.Tensor:
    a, b = repl.all_reduce(x[0]), repl.all_reduce(x[1])
    return a**3 + b**2 if repl.replica_id == 0 else b**2 + a**3


def _power_of_what_came(repl: Any, x: tf.Tensor, power: int) -> tf.Tensor:
    """Of x0^power * x1, on replica 1; the returned gradient may be constant in x0."""
    if repl.replica_id:
        return repl.recv(x, 0) ** power * x
    repl.send(x, 1)
    return tf.constant(0.0)


SECOND: dict[str, tuple[Sequence[Any], Loss, Sequence[Any]]] = {
    # With a = 4 and b = 6, the sum of all slopes is 12 * a**2 + 8 * b.
    "other orders": ([[2.0, 3.0]] * 2, _powers_in_other_orders, [[96.0, 8.0]] * 2),
    "gathered": ([[2.0, 3.0]] * 2, _gathered, [[0.0, 0.0]] * 2),
    **{
        op: (
            [[2.0, 3.0]] * 2,
            lambda repl, x, op=op: _reduced(repl, x, op),
            [[float(op == "prod")] * 2] * 2,
        )
        for op in ("sum", "mean", "max", "prod", "argmax")
    },
    "scattered": (
        [[3.0, 2.0]] * 2,
        lambda repl, x: repl.scatter(x) ** 3,
        [[18.0, 12.0], [0.0, 0.0]],
    ),
    # The sum of the slopes is 3 * 3 * value**2, on the owner; the slope of that is 18x.
    "extrema": (
        [[1.0, 5.0, 2.0], [4.0, 5.0, 2.0], [4.0, 0.0, 3.0]],
        lambda repl, x: tf.reduce_sum(repl.all_reduce(x, "argmax").value ** 3),
        [[0.0, 90.0, 0.0], [72.0, 0.0, 0.0], [0.0, 0.0, 54.0]],
    ),
    "message of x": (
        [3.0, 2.0],
        lambda repl, x: _power_of_what_came(repl, x, 1),
        [1.0, 1.0],
    ),
    "message of x**2": (
        [3.0, 2.0],
        lambda repl, x: _power_of_what_came(repl, x, 2),
        [4.0 + 6.0, 6.0],
    ),
    "message of x**3": (
        [3.0, 2.0],
        lambda repl, x: _power_of_what_came(repl, x, 3),
        [36.0 + 27.0, 27.0],
    ),
}


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives(name: str, mode: str) -> None:
    values, loss, want = SECOND[name]
    repl = helpers.make(len(values))

    def step() -> tf.Tensor:
        x = helpers.opaque(tf.constant(values)[repl.replica_id])

        # What all replicas differentiate needs no link, which would tie the calls, too.
        linked = tf.identity if name == "scattered" else repl.linked

        def slope() -> tf.Tensor:
            first = _by_tape(x, lambda: linked(loss(repl, x)))
            return linked(tf.reduce_sum(first))

        return _by_tape(x, slope)

    np.testing.assert_allclose(helpers.run(mode, repl, lambda: step), want, rtol=1e-6)


# --- Special places -------------------------------------------------------------------


def test_a_gradient_on_some_replicas_only_is_an_error() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x)
        return tape.gradient(y, x) if repl.replica_id else x

    with pytest.raises(
        replicator.MismatchError,
        match=r"(?s)A gradient of communication call 0 of replica 1 has no partner"
        r".*in the gradient, at .*test_gradients.py:\d+ in step.*Fix: ",
    ):
        repl.run(step)


@pytest.mark.battery(5)
@pytest.mark.parametrize("op", ["sum", "mean", "max", "prod"])
@pytest.mark.parametrize("by", ["tape", "tf.gradients"])
def test_upstream_gradients_may_be_sparse(by: str, op: str) -> None:
    """tf.gather's gradient is IndexedSlices; repeated rows add up."""
    repl = helpers.make(2)
    rows = [[0, 2, 2], [1, 2, 0]]

    def step(gather: bool) -> tf.Tensor:
        r = repl.replica_id
        x = helpers.opaque(np.random.RandomState(r).rand(4, 2))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x, op)
            if gather:
                picked = tf.gather(y, rows[r])
            else:
                picked = tf.one_hot(rows[r], 4, dtype=tf.float64) @ y
            loss = tf.reduce_sum(picked**2)
        return tape.gradient(loss, x) if by == "tape" else tf.gradients(loss, x)[0]

    sparse = repl.run(lambda: step(True))
    dense = repl.run(lambda: step(False))
    for one, two in zip(sparse, dense, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-14)


@pytest.mark.parametrize("by", ["tape", "tf.gradients"])
@pytest.mark.parametrize("op", ["sum", "min", "prod"])
def test_leaves_that_the_loss_does_not_use_have_gradient_zero(op: str, by: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        xs = [helpers.opaque(2.0 + repl.replica_id) for _ in range(3)]
        with tf.GradientTape() as tape:
            tape.watch(xs)
            y = repl.all_reduce([xs[0], xs[1], tf.constant(1), xs[2]], op)
            loss = y[0] * 1.0 + y[3] * 1.0
        if by == "tape":
            return tape.gradient(loss, xs)
        return tf.gradients(loss, xs)

    used, unused, last = repl.run(step)
    want = {"sum": [2.0, 2.0], "min": [2.0, 0.0], "prod": [6.0, 4.0]}[op]
    assert [float(d) for d in used] == [float(d) for d in last] == want
    assert [float(d) for d in unused] == [0.0, 0.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_gradients_by_variables(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Any:
        w = tf.Variable([1.0, 2.0])

        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                y = repl.all_reduce(w * (1.0 + repl.replica_id))
                loss = tf.reduce_sum(y**2)
            return tape.gradient(loss, w)

        return step

    # Each loss is (3w)**2; each component's share of 2 * 18w is by its factor.
    first, second = helpers.run(mode, repl, make_step)
    np.testing.assert_array_equal(first, [12.0, 24.0])
    np.testing.assert_array_equal(second, [24.0, 48.0])


def test_gradients_taken_after_the_build_stop_at_the_step() -> None:
    """They are None, as around a step everywhere else."""
    repl = helpers.make(2)
    with tf.Graph().as_default():
        xs = [helpers.opaque(2.0), helpers.opaque(3.0)]
        ys = repl.run(lambda: repl.all_reduce(xs[repl.replica_id] ** 2, "mean"))
        assert tf.gradients(list(ys), xs) == [None, None]
        with helpers.session() as session:
            assert session.run(ys) == (6.5, 6.5)
