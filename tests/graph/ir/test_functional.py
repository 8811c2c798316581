# SPDX-License-Identifier: Apache-2.0
"""Programs that turn control flow of TensorFlow 2 off: what is built, what is refused.

Most tests build a tf.Graph with the switch off, as tf.compat.v1.disable_v2_behavior()
leaves it, and compare with plain TensorFlow in such a graph.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from replicator.graph.ir import functional
from tests import helpers

v1 = tf.compat.v1
DATA = 2 * np.sin(np.arange(24, dtype=np.float32)).reshape(6, 4)
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "mirrored": (2, {}),
    "sharded": (3, {"variables": "sharded"}),
    "clone": (3, {"build": "clone"}),
}


@pytest.fixture(autouse=True)
def _v1_control_flow() -> Iterator[None]:
    with helpers.v1_control_flow():
        yield
        assert not _is_on(), "it is restored"


def _is_on() -> bool:
    """Whether a tf.Graph gets control flow of TensorFlow 2."""
    with tf.Graph().as_default():
        op = v1.cond(tf.constant(True), lambda: 1, lambda: 2).op
    return bool(op.type != "Merge")


@contextlib.contextmanager
def _session() -> Iterator[v1.Session]:
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(v1.local_variables_initializer())
        yield session


def _own_id(ctx: replicator.InputContext) -> tf.Tensor:
    return tf.constant(ctx.replica_id)


# --- The switch -----------------------------------------------------------------------


def test_it_is_on_in_the_context_the_scope_and_in_steps() -> None:
    seen = []
    repl = helpers.make(2, build="trace")
    with tf.Graph().as_default():
        repl.run(lambda: seen.append(_is_on()))
        with repl.context():
            seen.append(_is_on())
            repl.run(lambda: seen.append(_is_on()))
            seen.append(_is_on())
    with repl.context():  # eagerly, too
        seen.append(_is_on())
    with tf.Graph().as_default(), replicator.AutoDist(["CPU:0", "CPU:1"]).scope():
        seen.append(_is_on())
    tf.function(lambda: repl.run(lambda: seen.append(_is_on())), autograph=False)()
    assert seen == [True] * 10


def test_it_is_restored_after_an_error_and_in_a_function() -> None:
    with pytest.raises(ZeroDivisionError), functional.control_flow():
        raise ZeroDivisionError

    @tf.function(autograph=False)
    def function() -> None:  # where TensorFlow says that it is on
        with functional.control_flow():
            assert _is_on()
        assert not _is_on()

    function()
    tf.compat.v1.enable_control_flow_v2()
    with functional.control_flow():
        pass
    assert _is_on()
    tf.compat.v1.disable_control_flow_v2()


def test_it_stays_on_until_the_last_thread_is_done() -> None:
    inside, done = threading.Barrier(2), threading.Event()

    def other() -> None:
        with functional.control_flow():
            inside.wait(60)
            done.wait(60)

    thread = threading.Thread(target=other)
    with functional.control_flow():
        thread.start()
        inside.wait(60)
    assert _is_on()
    done.set()
    thread.join()
    assert not _is_on()


# --- Training -------------------------------------------------------------------------


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


def _trained(count: int, options: dict[str, Any]) -> list[Any]:
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
            loss = tf.reduce_mean(tf.reduce_sum(_loops(w, x, b) ** 2, -1))
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


@pytest.mark.battery(2)
@pytest.mark.parametrize("options", OPTIONS)
def test_trains_as_one_device(options: str) -> None:
    got = _trained(*OPTIONS[options])
    for one, other in zip(_trained(0, {}), got, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


# --- What was built elsewhere ---------------------------------------------------------


def _frozen(loop: bool = False) -> Any:
    """Returns a graph of x with a conditional, and a loop if asked, of TensorFlow 1."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [], "x")
        y = tf.cond(x > 0, lambda: tf.constant(1.0), lambda: tf.constant(2.0))
        if loop:
            y = tf.while_loop(lambda y: y < 9, lambda y: 3 * y, [y])[0]
        tf.identity(y, "y")
    return graph.as_graph_def()


def _imported(frozen: Any, x: tf.Tensor) -> tf.Tensor:
    return tf.graph_util.import_graph_def(frozen, {"x": x}, ["y:0"])[0]


def _refused(what: str) -> Any:
    return pytest.raises(
        errors.UnsupportedError,
        match=rf"(?s)^{what}\S* belongs to a conditional or a loop of TensorFlow 1; on "
        r"replicas, there can only be those of TensorFlow 2.*"
        r"  (at|imported, and used at) \S*test_functional\.py:\d+ in \S+\n"
        r"Fix: call tf\.compat\.v1\.enable_control_flow_v2\(\) before building it; "
        r"call what was made elsewhere in a tf\.function, or in the input pipeline\.",
    )


@pytest.mark.parametrize("build", ["trace", "clone"])
@pytest.mark.parametrize("mode", ["eager", "session"])
@pytest.mark.parametrize("nested", [False, True])
def test_an_imported_graph_in_a_step_is_refused(
    nested: bool, mode: str, build: str
) -> None:
    frozen = _frozen(loop=True)
    around = tf.Graph().as_default() if mode == "session" else contextlib.nullcontext()
    with around:
        repl = helpers.make(3, build=build)

        def step(r: tf.Tensor) -> tf.Tensor:
            def total(x: tf.Tensor) -> tf.Tensor:
                return repl.all_reduce(_imported(frozen, x))

            return (tf.function(total) if nested else total)(tf.cast(r, tf.float32))

        with _refused(r"Switch \S*import/cond/Switch"):
            repl.run(step, _own_id)


def test_it_may_be_called_in_a_function_or_in_the_input_pipeline() -> None:
    frozen, repl = _frozen(), helpers.make(2)

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensors(float(ctx.replica_id))
        return data.map(lambda x: (x, _imported(frozen, x)))

    @tf.function(autograph=False)
    def function(x: tf.Tensor) -> tf.Tensor:
        return _imported(frozen, x)

    def step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return repl.all_reduce(function(x) + 2 * y), y

    totals, parts = repl.run(step, input_fn)
    assert [float(x) for x in parts] == [2, 1]
    assert [float(x) for x in totals] == [9, 9]


def test_what_decides_in_such_a_function_decides_whether_values_are_equal() -> None:
    frozen, repl = _frozen(), helpers.make(2)
    with repl.context():
        v = tf.Variable(1.0)

    def step(r: tf.Tensor) -> None:
        value = tf.function(lambda x: _imported(frozen, x))(tf.cast(r, tf.float32))
        tf.raw_ops.AssignVariableOp(resource=v.handle, value=value)

    with pytest.raises(errors.ContextError, match="would drift apart"):
        repl.run(step, _own_id)


@pytest.mark.parametrize("where", ["branch", "loop", "assertion"])
def test_what_a_step_uses_may_not_be_built_outside_of_the_context(where: str) -> None:
    with tf.Graph().as_default():
        repl = helpers.make(2)
        x = v1.placeholder(tf.float32, [])
        if where == "branch":
            rate = tf.cond(x > 0, lambda: 2 * x, lambda: -x)
        elif where == "loop":
            rate = tf.while_loop(lambda y: y < 9, lambda y: 2 * y, [x])[0]
        else:
            with tf.control_dependencies([tf.debugging.assert_less(x, 9.0)]):
                rate = tf.identity(x)
        with _refused("(Switch|Merge|NextIteration|Exit) "):
            repl.run(lambda: repl.all_reduce(tf.ones([])) * rate)
        with repl.context():
            rate = tf.cond(x > 0, lambda: 2 * x, lambda: -x)
        fetches = repl.run(lambda: repl.all_reduce(tf.ones([])) * rate)
        with _session() as session:
            assert set(session.run(fetches, {x: 3.0})) == {12}


@pytest.mark.parametrize("where", ["branch", "loop"])
def test_a_step_inside_it_is_refused(where: str) -> None:
    with tf.Graph().as_default():
        repl = helpers.make(2)

        def inside(*_: Any) -> tf.Tensor:
            return repl.run(lambda: repl.all_reduce(tf.constant(1.0)))[0]

        yes = v1.placeholder(tf.bool, [])
        with _refused("(Switch|Enter) "):
            if where == "branch":
                tf.cond(yes, inside, lambda: 0.0)
            else:
                tf.while_loop(lambda x: x < 1, inside, [tf.constant(0.0)])
