# SPDX-License-Identifier: Apache-2.0
"""linked: a loss that depends on sent messages, so that their gradients come back.

By convention, the sum of all replicas' losses is differentiated; a tape or tf.gradients
only visits what the replica's own loss depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests import helpers

X = [2.0, 5.0]  # the operands of replicas 0 and 1


def _cube_of_what_came(
    repl: replicator.Replicator, x: tf.Tensor, tag: int = 0
) -> tf.Tensor:
    """Replica 0 sends x, replica 1 has the loss x0^3 * x1: gradients 12 x1 and 8."""
    if repl.replica_id == 0:
        repl.send(x, 1, tag=tag)
        return repl.linked(0.0)
    return repl.recv(x, 0, tag=tag) ** 3 * x


WANT = [60.0, 8.0]


# --- The value ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_it_is_the_same_value(mode: str, dtype: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = tf.cast(helpers.opaque(X), dtype)
        if repl.replica_id == 0:
            repl.send(x, 1)
        else:
            repl.recv(x, 0)
        y = repl.linked(x)
        assert y.dtype == x.dtype
        assert y.shape == x.shape
        return tf.cast(tf.math.real(y), tf.float32)

    for y in helpers.run(mode, repl, lambda: step):
        np.testing.assert_array_equal(y, X)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_where_nothing_was_sent_it_changes_nothing(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        x = helpers.opaque(X[repl.replica_id])
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = repl.linked(repl.linked(x**2))
        return loss, tape.gradient(loss, x)

    losses, gradients = helpers.run(mode, repl, lambda: step)
    assert [float(loss) for loss in losses] == [4.0, 25.0]
    assert [float(d) for d in gradients] == [4.0, 10.0]


# --- Gradients ------------------------------------------------------------------------


def _by_tape(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = loss()
    return tape.gradient(value, x)


def _by_graph(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.gradients(loss(), x)[0]


def _by_nested_function(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
    """All of it is in a function, its gradients as well."""
    return tf.function(lambda: _by_tape(x, loss))()


def _of_nested_function(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
    """The tape is outside of the function that sends and links."""
    return _by_tape(x, tf.function(loss))


HOW = [_by_tape, _by_graph, _by_nested_function, _of_nested_function]


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__.strip("_"))
def test_gradients_come_back(how: Callable[..., tf.Tensor], mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(X[repl.replica_id])
        return how(x, lambda: _cube_of_what_came(repl, x))

    assert [float(d) for d in helpers.run(mode, repl, lambda: step)] == WANT


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_linked_loss_of_its_own_counts_as_well(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(X[repl.replica_id])
        return _by_tape(x, lambda: _cube_of_what_came(repl, x) + x**2)

    got = [float(d) for d in helpers.run(mode, repl, lambda: step)]
    assert got == [60.0 + 4.0, 8.0 + 10.0]


def test_a_scale_of_the_loss_is_no_scale_of_what_comes_back() -> None:
    """A gradient that comes back is scaled by the replica whose loss it is of."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(X[repl.replica_id])
        scale = [100.0, 2.0][repl.replica_id]
        return _by_tape(x, lambda: _cube_of_what_came(repl, x) * scale)

    assert [float(d) for d in repl.run(step)] == [2.0 * d for d in WANT]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_it_links_all_that_was_sent_so_far(mode: str) -> None:
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        x = helpers.opaque(3.0)

        def loss() -> tf.Tensor:
            if repl.replica_id > 0:
                return repl.recv(x, 0) * repl.replica_id
            repl.send(x**2, 1)
            repl.send(x, 2)
            return repl.linked(x)

        return _by_tape(x, loss)

    got = [float(d) for d in helpers.run(mode, repl, lambda: step)]
    assert got == [2 * 3.0 * 1.0 + 2.0 + 1.0, 0.0, 0.0]


def test_what_is_sent_afterwards_is_not_linked() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(3.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = repl.linked(x) if repl.replica_id == 0 else x
            if repl.replica_id == 0:
                repl.send(x, 1)
            else:
                repl.recv(tf.TensorSpec([]), 0)
        return tape.gradient(loss, x)

    assert [float(d) for d in repl.run(step)] == [1.0, 1.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_twice_by_a_persistent_tape(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(X[repl.replica_id])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = _cube_of_what_came(repl, x)
        return tape.gradient(loss, x) + tape.gradient(loss, x)

    got = [float(d) for d in helpers.run(mode, repl, lambda: step)]
    assert got == [2.0 * d for d in WANT]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_from_outside_and_inside_of_a_function_at_once(mode: str) -> None:
    """A message sent outside is linked inside too, and its gradient comes back once."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(X[repl.replica_id])

        def loss() -> tf.Tensor:
            outside = _cube_of_what_came(repl, x, tag=1)
            inner = tf.function(lambda: _cube_of_what_came(repl, x, tag=2))
            return repl.linked(outside + inner())

        return _by_tape(x, loss)

    got = [float(d) for d in helpers.run(mode, repl, lambda: step)]
    assert got == [2.0 * d for d in WANT]


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("place", ["cond", "loop"])
def test_inside_control_flow(place: str, mode: str) -> None:
    """Messages sent in a branch or a body are linked there."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(X[repl.replica_id])

        def loss() -> tf.Tensor:
            if place == "cond":
                yes = helpers.opaque(True)
                return tf.cond(yes, lambda: _cube_of_what_came(repl, x), lambda: x)
            return tf.while_loop(
                lambda k, _: k < helpers.opaque(3),
                lambda k, total: (k + 1, total + _cube_of_what_came(repl, x)),
                (0, 0.0),
            )[1]

        return _by_graph(x, loss)

    turns = {"cond": 1, "loop": 3}[place]
    got = [float(d) for d in helpers.run(mode, repl, lambda: step)]
    assert got == [turns * d for d in WANT]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_variables_are_trained_through_it(mode: str) -> None:
    """A variable on replica 0 alone moves down the gradient of replica 1's loss."""
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        weight = tf.Variable(2.0)

        def step() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = _cube_of_what_came(repl, weight * 1.0)
            d = repl.all_reduce(tape.gradient(loss, weight))
            weight.assign_sub(0.01 * d)
            return weight.read_value()

        return step

    weight = 2.0
    for _ in range(2):
        weight -= 0.01 * 4.0 * weight**3
    got = helpers.run(mode, repl, make_step, steps=2)
    np.testing.assert_allclose(got, [weight] * 2, rtol=1e-6)


# --- Errors ---------------------------------------------------------------------------


def _in_cond(f: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.cond(helpers.opaque(True), f, lambda: tf.constant(0.0))


def _in_loop(f: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.while_loop(lambda k, _: k < 1, lambda k, _: (k + 1, f()), (0, 0.0))[1]


def _in_map_fn(f: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.reduce_sum(tf.map_fn(lambda _: f(), tf.zeros([1])))


def _in_function(f: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.function(f)()


def _in_cond_in_function(f: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.function(lambda: _in_cond(f))()


INSIDE = {
    "conditional": _in_cond,
    "loop": _in_loop,
    "loop in map_fn": _in_map_fn,
    "function": _in_function,
    "function and conditional": _in_cond_in_function,
}


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("place", "primitive"),
    [
        *((place, "send") for place in INSIDE),
        ("loop", "reduce"),
        ("function", "gather"),
    ],
)
def test_what_was_sent_inside_is_linked_there_or_refused(
    place: str, primitive: str
) -> None:
    """Outside, its receipt is out of reach; the error names alternatives."""
    repl = helpers.make(2)

    def sent(x: tf.Tensor) -> tf.Tensor | None:
        """Returns replica 0's message on replica 1."""
        if primitive == "reduce":
            return repl.reduce(x if repl.replica_id == 0 else 0.0 * x, 1)
        if primitive == "gather":
            gathered = repl.gather(x, 1)
            return None if gathered is None else gathered[0]
        if repl.replica_id == 0:
            repl.send(x, 1)
            return None
        return repl.recv(x, 0)

    def step(within: bool) -> tf.Tensor:
        x = helpers.opaque(X[repl.replica_id])

        def part() -> tf.Tensor:
            y = sent(x)
            y = 7.0 * x if y is None else y**3
            return repl.linked(y) if within else y

        return _by_tape(x, lambda: repl.linked(INSIDE[place](part)))

    kind = place.partition(" ")[0]
    with pytest.raises(
        errors.MismatchError,
        match=rf"(?s)A gradient of .* of replica 1 has no partner.*inside a {kind}, "
        rf"replica 0 .*: {primitive} .*Fix: .*send[s]? return repl\.linked\(y\)",
    ):
        repl.run(lambda: step(False))
    got = [float(d) for d in repl.run(lambda: step(True))]
    assert got == [7.0 + 3 * X[0] ** 2, 0.0]


@pytest.mark.parametrize("loss", [3, True, "text", [1.0, 2.0], {}], ids=repr)
def test_a_loss_that_is_no_number_of_the_kind_is_refused(loss: Any) -> None:
    repl = helpers.make(1)
    with pytest.raises(
        errors.ArgumentError,
        match=r"(?s)linked on replica 0 was .*test_linked\.py:\d+ in .*Fix: .*floating",
    ):
        repl.run(lambda: repl.linked(loss))


def test_outside_a_step() -> None:
    with pytest.raises(errors.ContextError, match="^linked was called outside a step"):
        helpers.make(2).linked(1.0)
