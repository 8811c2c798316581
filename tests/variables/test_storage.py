# SPDX-License-Identifier: Apache-2.0
"""Variables with one owner become mirrored where a step needs components."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests import helpers

VALUE = np.arange(6, dtype=np.float32).reshape(2, 3)
jit = tf.function(jit_compile=True)


def _step(
    repl: replicator.Replicator, forward: Callable[[Any], Any], v: Any, optimizer: Any
) -> Callable[[], Any]:
    """Returns a step_fn that trains v, with inputs r + 1 on replica r."""

    def step_fn() -> Any:
        with tf.GradientTape() as tape:
            loss = forward((repl.replica_id + 1.0) * tf.ones_like(v)) / 10
        (gradient,) = tape.gradient(loss, [v])
        optimizer.apply_gradients([(gradient, v)])
        return repl.all_reduce(loss, "sum")

    return step_fn


def _make(
    count: int, variables: str
) -> tuple[replicator.Replicator, Any, Any, Callable[[Any], Any]]:
    repl = helpers.make(count, variables=variables, build="trace")
    with repl.context():
        v = tf.Variable(VALUE)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.1))
    return repl, v, optimizer, lambda x: tf.reduce_sum((x * v) ** 2)


@pytest.mark.battery(3)
@pytest.mark.parametrize("between", [0, 1, 3])
def test_training_goes_on_as_if_it_had_been_mirrored(between: int) -> None:
    """Steps before the one that needs components, and after; slots move as well."""
    losses = {}
    for variables in ("mirrored", "sharded"):
        repl, v, optimizer, forward = _make(3, variables)
        plain = _step(repl, forward, v, optimizer)
        compiled = _step(repl, jit(forward), v, optimizer)
        steps = [plain] * between + [compiled, plain, plain, compiled]
        losses[variables] = [float(repl.run(step)[0]) for step in steps]
        helpers.assert_replicas_equal([v, *optimizer.variables])
        slots = [one for one in optimizer.variables if one.shape.rank]
        assert len(slots) == 2
        for one in (v, *(slot.value for slot in slots)):
            assert len({id(component) for component in one.components}) == 3
        if between:
            expected = variables == "sharded"
            assert any("jit_compile=True" in n for n in repl.plan.notes) is expected
    np.testing.assert_allclose(losses["sharded"], losses["mirrored"], rtol=1e-6)


def test_only_what_needs_it_moves_and_all_of_it_at_once() -> None:
    repl = helpers.make(2, variables="sharded", build="trace")
    built = []
    with repl.context():
        inside = [tf.Variable(VALUE) for _ in range(5)]
        outside = tf.Variable(VALUE)
    compiled = jit(lambda: sum(tf.reduce_sum(v) for v in inside))

    def step_fn() -> Any:
        built.append(repl.replica_id)
        return compiled() + tf.reduce_sum(outside)

    assert [float(x) for x in repl.run(step_fn)] == [6 * VALUE.sum()] * 2
    assert built == [0, 0, 1]  # one more attempt, not one per variable
    assert [v.owner for v in inside] == [None] * 5 and outside.owner is not None
    (note,) = repl.plan.notes
    assert note.startswith("Not sharded, as used in a function with jit_compile=True")
    assert "test_storage.py" in note and " and 2 more" in note


def test_steps_inputs_go_on_where_they_were() -> None:
    repl, v, optimizer, forward = _make(2, "sharded")

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.range(100)

    def step_fn(x: Any) -> Any:
        return x, tf.reduce_sum(v)

    first = [int(x) for x in repl.run(step_fn, input_fn)[0]]
    repl.run(_step(repl, jit(forward), v, optimizer))
    second, sums = repl.run(step_fn, input_fn)
    assert first == [0, 1] and [int(x) for x in second] == [2, 3]
    np.testing.assert_allclose(list(sums), [v.numpy().sum()] * 2, rtol=1e-6)


def test_steps_that_were_built_before_write_all_components() -> None:
    repl, v, optimizer, forward = _make(2, "sharded")

    def step_fn() -> None:
        v.assign_add(tf.ones_like(v))

    repl.run(step_fn)
    repl.run(_step(repl, jit(forward), v, optimizer))
    repl.run(step_fn)
    assert v.owner is None
    helpers.assert_replicas_equal([v])


def test_a_function_of_the_users_relies_on_the_one_component() -> None:
    """It cannot be retraced: a step that needs components is refused."""
    repl, v, optimizer, forward = _make(2, "sharded")
    step = tf.function(lambda: repl.run(lambda: v.assign_add(tf.ones_like(v))))
    step()
    with pytest.raises(errors.UnsupportedError) as caught:
        repl.run(_step(repl, jit(forward), v, optimizer))
    message = str(caught.value)
    assert "used in a function with jit_compile=True" in message
    assert message.count("test_storage.py") == 2, message
    assert "build this step first" in message
    step()
    np.testing.assert_array_equal(v, VALUE + 2)
    assert v.owner is not None


@pytest.mark.battery(3)
@pytest.mark.parametrize("writes", ["assign", "scatter", "read"])
def test_functions_outside_of_steps(writes: str) -> None:
    """Functions that read still work; writes would reach the one component only."""
    repl, v, optimizer, forward = _make(2, "sharded")

    @tf.function
    def outside() -> Any:
        if writes == "assign":
            v.assign_add(tf.ones_like(v))
        if writes == "scatter":
            v.scatter_add(tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 1])))
        return tf.reduce_sum(v)

    before = float(outside())
    step = _step(repl, jit(forward), v, optimizer)
    if writes != "read":
        with pytest.raises(errors.UnsupportedError, match="used in a function"):
            repl.run(step)
        assert float(outside()) == before + 6
        return
    repl.run(step)
    np.testing.assert_allclose(outside(), v.numpy().sum(), rtol=1e-6)
    assert float(outside()) != before


@pytest.mark.parametrize("how", ["load", "saver"])
def test_in_a_session_what_was_written_before_stays(how: str, tmp_path: Any) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        repl, v, optimizer, forward = _make(2, "sharded")
        session.run(tf.compat.v1.global_variables_initializer())
        if how == "load":
            v.load(VALUE, session)
        else:
            tf.compat.v1.train.Saver([v])
        with pytest.raises(errors.UnsupportedError, match="build this step first"):
            repl.run(_step(repl, jit(forward), v, optimizer))


@pytest.mark.parametrize("early", [False, True])
def test_in_a_session_all_components_are_initialized(early: bool) -> None:
    """Even by an initializer that was created before the step is built."""
    losses = {}
    for variables in ("mirrored", "sharded"):
        with tf.Graph().as_default():
            repl, v, optimizer, forward = _make(2, variables)
            if early:
                early_op = tf.compat.v1.variables_initializer([v])
            loss = repl.run(_step(repl, jit(forward), v, optimizer))
            values = [c.read_value() for c in v.components]
            with tf.compat.v1.Session() as session:
                rest = set(tf.compat.v1.global_variables()) - {v} if early else None
                if early:
                    session.run(early_op)
                    session.run(tf.compat.v1.variables_initializer(list(rest)))
                else:
                    session.run(tf.compat.v1.global_variables_initializer())
                losses[variables] = [session.run(loss) for _ in range(3)]
                one, two = session.run(values)
        np.testing.assert_array_equal(one, two)
        assert one.any()
    np.testing.assert_allclose(losses["sharded"], losses["mirrored"], rtol=1e-6)


def test_what_is_saved_after_it_moved(tmp_path: Any) -> None:
    """Checkpoints and SavedModels hold one value; loading reaches all components."""
    repl, v, optimizer, forward = _make(3, "sharded")
    with repl.context():
        second = tf.Variable(VALUE)  # whose owner differs from v's
    compiled = jit(lambda: tf.reduce_sum(v) + tf.reduce_sum(second))
    repl.run(lambda: compiled())
    module = tf.Module()
    module.v, module.second = v, second
    module.add = tf.function(lambda: second.assign_add(v + second).read_value())
    module.add.get_concrete_function()
    path = tf.train.Checkpoint(v=v, second=second).write(str(tmp_path / "saved"))
    tf.saved_model.save(module, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.add(), 3 * VALUE)
    np.testing.assert_array_equal(loaded.add(), 7 * VALUE)
    second.assign(VALUE + 9)
    np.testing.assert_array_equal(helpers.components(second), [VALUE + 9] * 3)
    tf.train.Checkpoint(v=v, second=second).read(path)
    np.testing.assert_array_equal(helpers.components(second), [VALUE] * 3)


def test_a_need_that_a_failed_build_has_found() -> None:
    """The compiled function is traced once, in the step_fn that raises."""
    repl, v, _, _ = _make(3, "sharded")
    compiled = jit(lambda x: x * tf.reduce_sum(v))

    def step_fn(fail: bool) -> Any:
        value = compiled(2.0)
        if fail:
            raise ZeroDivisionError
        return value

    with pytest.raises(ZeroDivisionError):
        repl.run(lambda: step_fn(True))
    np.testing.assert_array_equal(list(repl.run(lambda: step_fn(False))), [30.0] * 3)


def test_what_was_refused_once_is_refused_again() -> None:
    repl, v, optimizer, forward = _make(2, "sharded")
    tf.function(lambda: repl.run(lambda: v.assign_add(tf.ones_like(v))))()
    step = _step(repl, jit(forward), v, optimizer)
    for _ in range(2):
        with pytest.raises(errors.UnsupportedError, match="build this step first"):
            repl.run(step)


@pytest.mark.parametrize("moved", [False, True])
def test_compiled_functions_outside_of_steps(moved: bool) -> None:
    """They are compiled for the first device, wherever the owners are."""
    repl = helpers.make(3, variables="sharded", build="trace")
    with repl.context():
        values = [tf.Variable(VALUE + k) for k in range(3)]
    assert {v.owner for v in values} == {0, 1, 2}
    inside = jit(lambda: tf.add_n([tf.reduce_sum(v) for v in values]))
    if moved:
        repl.run(lambda: inside())
    outside = jit(lambda: tf.add_n([tf.reduce_sum(v) for v in values]))
    for v in values:
        v.assign_add(tf.ones_like(v))
    for function in [outside, inside] if moved else [outside]:
        assert float(function()) == sum(float(tf.reduce_sum(v)) for v in values)


def test_a_keras_model_that_is_compiled_predicts_outside_of_steps() -> None:
    repl = helpers.make(3, variables="sharded", build="trace")
    with repl.context():
        layers = [tf.keras.layers.Dense(4) for _ in range(3)]
        model = tf.keras.Sequential([tf.keras.Input([2]), *layers])
        model.compile(loss="mse", jit_compile=True)
    x = np.ones([5, 2], np.float32)
    np.testing.assert_allclose(model.predict(x, verbose=0), model(x), rtol=1e-5)


def test_threads_of_two_replicators_that_share_a_variable() -> None:
    """No write is lost while the other Replicator gives the variable components."""
    for _ in range(3):
        one, v, optimizer, forward = _make(3, "sharded")
        two = helpers.make(3, variables="sharded", build="trace")
        stop = threading.Event()
        failed: list[BaseException] = []

        def write(repl: Any = two, stop: Any = stop, failed: Any = failed) -> None:
            try:
                while not stop.is_set():
                    repl.run(step_fn)
            except BaseException as error:
                failed.append(error)

        def step_fn(v: Any = v) -> None:
            v.assign_add(tf.ones_like(v))

        two.run(step_fn)
        thread = threading.Thread(target=write)
        thread.start()
        try:
            one.run(_step(one, jit(forward), v, optimizer))
        finally:
            stop.set()
            thread.join()
        assert not failed
        first, *others = helpers.components(v)
        for other in others:
            np.testing.assert_array_equal(first, other)


def test_threads_of_one_replicator() -> None:
    repl, v, optimizer, forward = _make(2, "sharded")
    plain = _step(repl, forward, v, optimizer)
    repl.run(plain)
    failed: list[BaseException] = []

    def train() -> None:
        try:
            for _ in range(50):
                repl.run(plain)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    repl.run(_step(repl, jit(forward), v, optimizer))
    for thread in threads:
        thread.join()
    assert not failed
    helpers.assert_replicas_equal([v])
