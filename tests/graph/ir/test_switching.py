# SPDX-License-Identifier: Apache-2.0
"""In control flow of TensorFlow 1, a session's step does what plain TensorFlow does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests import helpers

v1 = tf.compat.v1
DATA = 2 * np.sin(np.arange(24, dtype=np.float32)).reshape(6, 4)
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "mirrored": (2, {}),
    "sharded": (3, {"variables": "sharded"}),
    "clone": (3, {"build": "clone"}),
}
Branch = Callable[[], Any]
Flow = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


@pytest.fixture(autouse=True)
def _v1_control_flow() -> Iterator[None]:
    with helpers.v1_control_flow():
        yield


@contextlib.contextmanager
def _session() -> Iterator[v1.Session]:
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(v1.local_variables_initializer())
        yield session


def _own_id(ctx: replicator.InputContext) -> tf.Tensor:
    return tf.constant(ctx.replica_id)


# --- Training -------------------------------------------------------------------------


def _branches(w: tf.Tensor, x: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    def inner() -> tf.Tensor:
        tf.debugging.assert_less(x, 9.0)
        return tf.matmul(x, w) * b

    def outer() -> tf.Tensor:
        return tf.cond(b[1] < 9, inner, lambda: tf.matmul(x, w))

    tf.debugging.assert_greater(x, -9.0)
    y = tf.cond(b[0] < 9, outer, lambda: tf.matmul(x, w) - w[0])
    return y + tf.cond(tf.shape(x)[0] > 9, lambda: b, lambda: 3 * tf.gather(w, 1))


def _loops(w: tf.Tensor, x: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    def turn(y: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_less(y, 1e6)
        z = tf.cond(b[0] < 9, lambda: tf.matmul(y, w), lambda: tf.matmul(y, -w))
        tf.debugging.assert_less(z, 1e6)
        return tf.tanh(tf.matmul(z, w, transpose_b=True))

    def more(i: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        inside = tf.while_loop(
            lambda k, _: k < 2, lambda k, z: (k + 1, turn(z)), (0, y)
        )
        return i + 1, inside[1] + b[0]

    return tf.while_loop(lambda i, _: i < 2, more, (0, x))[1]


def _mapped(w: tf.Tensor, x: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    def rows() -> tf.Tensor:
        return tf.map_fn(lambda row: tf.linalg.matvec(w, row, transpose_a=True), x)

    return tf.cond(b[0] < 9, rows, lambda: tf.matmul(x, w)) * b


def _trained(flow: Flow, count: int, options: dict[str, Any]) -> list[Any]:
    """Trains on `count` replicas, or, if that is 0, without Replicator."""
    with tf.Graph().as_default():
        repl = helpers.make(max(count, 1), **options)
        with repl.context() if count else contextlib.nullcontext():
            start = np.cos(np.arange(12, dtype=np.float32)).reshape(4, 3)
            variables = [tf.Variable(start), tf.Variable(np.ones(3, np.float32))]
            optimizer = v1.train.MomentumOptimizer(0.05, 0.5)
            if count:
                optimizer = repl.wrap_optimizer(optimizer)

        def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Operation]:
            w, b = variables
            loss = tf.reduce_mean(tf.reduce_sum(flow(w, x, b) ** 2, -1))
            grads = optimizer.compute_gradients(loss, variables)
            update = optimizer.apply_gradients(grads)
            return (repl.all_reduce(loss, "mean") if count else loss), update

        parts = DATA.reshape(max(count, 1), -1, 4)
        if count:
            fetches = repl.run(step, lambda ctx: tf.constant(parts[ctx.replica_id]))
        else:
            fetches = step(tf.constant(DATA))
        with _session() as session:
            losses = [session.run(fetches)[0] for _ in range(3)]
            values = session.run([variable.read_value() for variable in variables])
    return [np.ravel([np.ravel(loss)[0] for loss in losses]), *values]


@pytest.mark.battery(6)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("flow", [_branches, _loops, _mapped])
def test_trains_as_one_device(flow: Flow, options: str) -> None:
    # TensorFlow cannot differentiate a map_fn inside of a cond on several devices.
    got = _trained(flow, *OPTIONS[options])
    for one, other in zip(_trained(flow, 0, {}), got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


# --- Effects --------------------------------------------------------------------------


def _note(said: list[Any], *what: Any) -> None:
    tf.py_function(lambda *told: said.append([int(t) for t in told]), what, [])


def _said(count: int, taken: bool) -> list[list[Any]]:
    """Runs a step with effects that nothing depends on; returns them by replica."""
    messages: list[Any] = []

    def step(r: tf.Tensor) -> tf.Tensor:
        def yes() -> tf.Tensor:
            _note(messages, r, 1)
            tf.cond(~chosen, lambda: 0, lambda: [_note(messages, r, 2), 1][1])
            return 1

        def turn(i: tf.Tensor) -> tf.Tensor:
            _note(messages, r, 3, i)
            tf.cond(i < 1, lambda: [_note(messages, r, 4, i), 0][1], lambda: 1)
            return i + 1

        def go_on(i: tf.Tensor) -> tf.Tensor:
            _note(messages, r, 5, i)
            return i < 2

        _note(messages, r, 0)
        tf.cond(chosen, yes, lambda: [_note(messages, r, 6), 0][1])
        tf.while_loop(go_on, turn, [0], parallel_iterations=1)
        tf.cond(chosen, lambda: tf.while_loop(go_on, turn, [0]), lambda: [0])
        _note(messages, r, 7)
        return r

    with tf.Graph().as_default():
        chosen = v1.placeholder(tf.bool, [])
        fetches = helpers.make(count).run(step, _own_id)
        with _session() as session:
            for _ in range(2):
                session.run(fetches, {chosen: taken})
                messages.append(None)
    return [[x[1:] for x in messages if x and x[0] == r] for r in range(count)]


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_effects_happen_in_the_order_of_the_program(count: int, taken: bool) -> None:
    loop = [[5, 0], [3, 0], [4, 0], [5, 1], [3, 1], [5, 2]]
    branch = [[1], [2]] if taken else [[6]]
    once = [[0], *branch, *loop, *loop * taken, [7]]
    assert _said(count, taken) == [once * 2] * count


WHERE: dict[str, Callable[[Branch], Any]] = {
    "step": lambda fail: fail(),
    "branch": lambda fail: tf.cond(tf.constant(True), fail, lambda: 0),
    "turn": lambda fail: tf.while_loop(lambda i: i < 2, lambda i: i + fail(), [0]),
    "condition": lambda fail: tf.while_loop(lambda i: fail() > i, lambda i: i + 1, [0]),
    "unused": lambda fail: tf.while_loop(
        lambda i: i < 2, lambda i: [tf.cond(i > 0, fail, lambda: 0), i + 1][1], [0]
    ),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("options", ["one", "mirrored", "sharded", "clone"])
@pytest.mark.parametrize("where", WHERE)
def test_what_fails_fails_before_anything_is_written(where: str, options: str) -> None:
    count, chosen = OPTIONS[options]
    with tf.Graph().as_default():
        repl = helpers.make(count, **chosen)
        with repl.context():
            v = tf.Variable(1.0)
        limit = v1.placeholder(tf.float32, [])

        def step(r: tf.Tensor) -> tf.Tensor:
            v.assign_add(repl.all_reduce(tf.constant(1.0), "mean"))

            def fail() -> int:
                tf.debugging.assert_less(
                    tf.cast(r, tf.float32), limit, message="too large"
                )
                return 1

            WHERE[where](fail)
            return v.read_value()

        fetches = repl.run(step, _own_id)
        with _session() as session:
            for _ in range(2):
                with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
                    session.run(fetches, {limit: count - 1.5})
                parts = [part.read_value() for part in v.components]
                assert set(session.run(parts)) == {1.0}
            assert set(session.run(fetches, {limit: count})) == {2.0}


# --- Variables ------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["one", "mirrored", "sharded"])
def test_reads_come_between_the_writes_around_them(options: str) -> None:
    count, chosen = OPTIONS[options]
    with tf.Graph().as_default():
        repl = helpers.make(count, **chosen)
        with repl.context():
            v = tf.Variable(1.0)
        yes = v1.placeholder(tf.bool, [])

        def step() -> list[tf.Tensor]:
            read = [v.read_value()]
            for _ in range(2):
                v.assign_add(repl.all_reduce(tf.constant(1.0), "mean"))
                read.append(tf.cond(yes, lambda: v + 0, lambda: -v))
                turns = tf.while_loop(lambda s: s < 20, lambda s: s + v, [v - v])
                read.append(turns[0])
            return [*read, v.read_value()]

        fetches = repl.run(step)
        with _session() as session:
            got = session.run(fetches, {yes: True})
            again = session.run(fetches, {yes: False})
    assert [set(x) for x in got] == [{1}, {2}, {20}, {3}, {21}, {3}]
    assert [set(x) for x in again] == [{3}, {-4}, {20}, {-5}, {20}, {5}]


def _writing(v: tf.Variable, yes: tf.Tensor) -> dict[str, Branch]:
    def in_a_loop() -> tf.Tensor:
        def turn(i: tf.Tensor) -> tf.Tensor:
            v.assign_add(1.0, read_value=False)
            return i + 1

        return tf.while_loop(lambda i: i < tf.where(yes, 3, 0), turn, [0])[0]

    def in_a_branch() -> tf.Tensor:
        return tf.cond(yes, lambda: v.assign_add(3.0).read_value(), lambda: 0.0)

    return {"branch": in_a_branch, "loop": in_a_loop}


@pytest.mark.parametrize("where", ["branch", "loop"])
def test_one_replica_writes_wherever_it_likes(where: str) -> None:
    for options in ({}, {"variables": "sharded"}):
        with tf.Graph().as_default():
            repl = helpers.make(1, **options)
            with repl.context():
                v = tf.Variable(1.0)
            yes = v1.placeholder(tf.bool, [])

            def step(v: Any = v, yes: Any = yes) -> list[tf.Tensor]:
                read = [v.read_value()]
                _writing(v, yes)[where]()
                return [*read, v.read_value(), v.assign_add(1.0).read_value()]

            fetches = repl.run(step)
            with _session() as session:
                got = [session.run(fetches, {yes: on}) for on in (True, False)]
            assert np.ravel(got).tolist() == [1, 4, 5, 5, 5, 6]


@pytest.mark.parametrize("where", ["branch", "loop"])
def test_several_that_write_there_are_refused(where: str) -> None:
    with tf.Graph().as_default():
        repl = helpers.make(2)
        with repl.context():
            first = tf.VariableAggregation.ONLY_FIRST_REPLICA
            v = tf.Variable(1.0, aggregation=first)
        yes = v1.placeholder(tf.bool, [])
        with pytest.raises(
            errors.ReplicatorError,
            match=r"(?s)in a conditional or a loop of TensorFlow 1.*at .*test_switching"
            r".*Fix: .*enable_control_flow_v2",
        ):
            repl.run(lambda: _writing(v, yes)[where]())


# --- Communication --------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True], ids=["itself", "traced_before"])
@pytest.mark.parametrize("where", ["branch", "loop"])
def test_communication_there_is_refused(where: str, traced: bool) -> None:
    with tf.Graph().as_default():
        repl = helpers.make(2)
        call = tf.function(repl.all_reduce) if traced else repl.all_reduce

        def step() -> tf.Tensor:
            x = tf.constant(1.0)
            if traced:
                x = call(x)
            if where == "branch":
                return tf.cond(x < 1, lambda: call(x), lambda: x)
            return tf.while_loop(lambda x: x < 9, call, [x])[0]

        with pytest.raises(
            errors.ReplicatorError,
            match=r"(?s)all_reduce on replica 0 is in a conditional or a loop of "
            r"TensorFlow 1.*test_switching.*Fix: .*enable_control_flow_v2",
        ):
            repl.run(step)


@pytest.mark.parametrize("options", ["mirrored", "sharded"])
def test_communication_around_it(options: str) -> None:
    """A barrier, the decision, the operands and the results."""
    count, chosen = OPTIONS[options]
    with tf.Graph().as_default():
        repl = helpers.make(count, **chosen)
        messages: list[Any] = []

        def step(r: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            x = repl.all_reduce(tf.cast(r, tf.float32))
            odd = tf.cond(
                tf.equal(r, 1), lambda: [_note(messages, 0), x][1], lambda: 2 * x
            )
            all_odd = repl.broadcast(tf.equal(r, 1), root=1)
            repl.barrier()
            _note(messages, 1)
            total = repl.all_reduce(odd)
            return tf.cond(all_odd, lambda: total, lambda: 0.0), repl.all_gather(
                odd[None]
            )

        fetches = repl.run(step, _own_id)
        with _session() as session:
            totals, odds = session.run(fetches)
    x = sum(range(count))
    expected = [x if r == 1 else 2 * x for r in range(count)]
    assert set(totals) == {sum(expected)}
    assert all(list(row) == expected for row in odds)
    assert messages == [[0], *[[1]] * count]


# --- Values that are equal by construction --------------------------------------------


# A loop's results are never proven equal.
@pytest.mark.parametrize(
    ("how", "equal"),
    [
        ("constants", True),
        ("constants", False),
        ("reads", True),
        ("reads", False),
        ("turns", False),
    ],
)
def test_a_value_is_equal_only_where_what_decides_is(how: str, equal: bool) -> None:
    with tf.Graph().as_default():
        repl = helpers.make(2)
        with repl.context():
            v, w = tf.Variable(5.0), tf.Variable(7.0)

        def step(r: tf.Tensor) -> tf.Tensor:
            x = tf.constant([1.0, -1.0])[r]
            yes = (repl.all_reduce(x) if equal else x) < 1
            if how == "constants":
                value = tf.cond(yes, lambda: 1.0, lambda: 2.0)
            elif how == "reads":
                value = tf.cond(yes, lambda: w + 1, lambda: w - 1)
            else:
                value = tf.while_loop(lambda y: y < x, lambda y: y + 1, [w - w])[0]
            tf.raw_ops.AssignVariableOp(resource=v.handle, value=value)
            return v.read_value()

        if not equal:
            with pytest.raises(errors.ContextError, match="would drift apart"):
                repl.run(step, _own_id)
            return
        fetches = repl.run(step, _own_id)
        with _session() as session:
            assert set(session.run(fetches)) == {1.0 if how == "constants" else 8.0}
