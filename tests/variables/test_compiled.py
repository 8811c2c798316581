# SPDX-License-Identifier: Apache-2.0
"""Functions with jit_compile=True in a step: one trace, each replica's variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

VALUE = np.array([1.0, 2.0], np.float32)


def jit(function: Callable[..., Any]) -> Any:
    return tf.function(function, jit_compile=True)


def own(repl: replicator.Replicator) -> tf.Tensor:
    """Returns 1 + replica_id, which no compiler can fold."""
    return helpers.opaque(1.0 + repl.replica_id)


# --- Values and gradients -------------------------------------------------------------


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_each_replica_reads_its_own_component(mode: str, num_replicas: int) -> None:
    repl = helpers.make(num_replicas)

    def make_step() -> Callable[[], Any]:
        counter = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, trainable=False
        )
        double = jit(lambda: 2.0 * counter)

        def step_fn() -> Any:
            counter.assign_add(own(repl))
            with tf.control_dependencies([counter.read_value()]):
                return double()

        return step_fn

    actual = helpers.run(mode, repl, make_step, steps=2)
    np.testing.assert_array_equal(actual, [4.0 * (r + 1) for r in range(num_replicas)])


def by_tape(loss: Any, variable: Any) -> Any:
    with tf.GradientTape() as tape:
        value = loss()
    return tape.gradient(value, variable)


def by_tape_of_tapes(loss: Any, variable: Any) -> Any:
    """The derivative of the gradient's square, divided by the gradient."""
    with tf.GradientTape() as outer:
        gradient = by_tape(loss, variable)
        squared = tf.reduce_sum(gradient**2)
    return outer.gradient(squared, variable) / gradient


def by_gradients(loss: Any, variable: Any) -> Any:
    return tf.gradients(loss(), variable)[0]


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("differentiate", [by_tape, by_tape_of_tapes, by_gradients])
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_gradients_reach_each_replicas_component(
    mode: str, differentiate: Any, inside: bool
) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        variable = tf.Variable(VALUE)

        def cube(x: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(x * variable**2)

        whole = jit(lambda x: differentiate(lambda: cube(x), variable))
        part = jit(cube)

        def step_fn() -> Any:
            x = own(repl)
            if inside:
                return whole(x)
            return differentiate(lambda: part(x), variable)

        return step_fn

    factor = 4.0 if differentiate is by_tape_of_tapes else 2.0
    if differentiate is by_tape_of_tapes:
        expected = [factor * (r + 1) * np.ones(2) for r in range(2)]
    else:
        expected = [factor * (r + 1) * VALUE for r in range(2)]
    np.testing.assert_allclose(helpers.run(mode, repl, make_step), expected)


@pytest.mark.parametrize("built", [True, False])
def test_a_keras_model_trains_as_without_the_compiler(built: bool) -> None:
    inputs = np.random.default_rng(0).normal(size=[2, 4, 3]).astype(np.float32)

    def train(wrap: Callable[[Any], Any]) -> tuple[list[float], list[np.ndarray]]:
        repl = helpers.make(2)
        tf.keras.utils.set_random_seed(0)
        with repl.context():
            model = tf.keras.Sequential(
                [tf.keras.layers.Dense(5, activation="tanh"), tf.keras.layers.Dense(1)]
            )
            if built:
                model.build((None, 3))
            optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.05))
        forward = wrap(lambda x: tf.reduce_mean((model(x) - 1.0) ** 2))

        def step_fn() -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = forward(helpers.opaque(inputs[repl.replica_id]))
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        losses = [float(np.mean(repl.run(step_fn))) for _ in range(5)]
        helpers.assert_replicas_equal(model.variables)
        return losses, model.get_weights()

    losses, weights = train(jit)
    expected, expected_weights = train(lambda function: function)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for one, two in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


# --- Places ---------------------------------------------------------------------------


def _conditional(read: Any, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x > 0.0, lambda: x * read(), lambda: 0.0 * x * VALUE)


def _loop(read: Any, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda turn, total: turn < 3,
        lambda turn, total: (turn + 1, total + x * read() / 3.0),
        (0, 0.0 * x * VALUE),
        maximum_iterations=3,
    )[1]


def _function(read: Any, x: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda: x * read())()


PLACES = [_conditional, _loop, _function]


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__[1:])
def test_control_flow_inside_and_around(place: Any, inside: bool, mode: str) -> None:
    """With the tape inside too: XLA cannot compile what an outer tape would need."""
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        variable = tf.Variable(VALUE)
        compiled = jit(variable.read_value)

        def differentiated(read: Any, x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                y = place(read, x)
            return y, tape.gradient(y, variable)

        whole = jit(lambda x: differentiated(variable.read_value, x))
        if inside:
            return lambda: whole(own(repl))
        return lambda: differentiated(compiled, own(repl))

    values, gradients = helpers.run(mode, repl, make_step)
    for r in range(2):
        np.testing.assert_allclose(values[r], (r + 1) * VALUE, rtol=1e-6)
        np.testing.assert_allclose(gradients[r], (r + 1) * np.ones(2), rtol=1e-6)


def test_one_function_in_two_steps() -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(VALUE)
    double = jit(lambda: 2.0 * variable)
    for _ in range(2):

        def step_fn() -> Any:
            with tf.GradientTape() as tape:
                y = double()
            return y, tape.gradient(y, variable)

        values, gradients = repl.run(step_fn)
        np.testing.assert_array_equal(values, [2 * VALUE] * 2)
        np.testing.assert_array_equal(gradients, [[2.0, 2.0]] * 2)
    assert double.experimental_get_tracing_count() == 1


# --- Writing --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", helpers.MODES)
def test_what_needs_no_agreement_is_written(mode: str) -> None:
    repl = helpers.make(2)
    variables = []

    def make_step() -> Callable[[], Any]:
        count = tf.Variable(0)
        total = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ)
        variables.extend([count, total])

        def write(x: tf.Tensor) -> Any:
            count.assign_add(1)
            total.assign_add(x)
            return count.read_value(), total.read_value()

        compiled = jit(write)
        return lambda: compiled(own(repl))

    counts, totals = helpers.run(mode, repl, make_step, steps=3)
    np.testing.assert_array_equal(counts, [3, 3])
    np.testing.assert_array_equal(totals, [3.0, 6.0])
    if mode != "session":
        helpers.assert_replicas_equal(variables[:1])


# --- Errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "communicate",
    [
        lambda repl, x, v: repl.all_reduce(x),
        lambda repl, x, v: repl.broadcast(x),
        lambda repl, x, v: tf.distribute.get_replica_context().all_reduce("SUM", x),
        lambda repl, x, v: tf.cond(x > 0, lambda: repl.all_reduce(x), lambda: x),
        lambda repl, x, v: v.assign_add([x, x]),  # would have to be averaged
    ],
    ids=["all_reduce", "broadcast", "tf.distribute", "conditional", "averaged"],
)
def test_communication_inside_is_refused(communicate: Any) -> None:
    repl = helpers.make(2, variables="mirrored")
    with repl.context():
        variable = tf.Variable(VALUE)
    compiled = jit(lambda x: communicate(repl, x, variable))
    with pytest.raises(
        replicator.ReplicatorError,
        match=r"(?s)(all_reduce|broadcast) on replica 0 is in a function with "
        r"jit_compile=True, which XLA compiles for one device\..*test_compiled.py:\d+"
        r".*Fix: communicate before or after it, or leave out jit_compile=True",
    ):
        repl.run(lambda: compiled(own(repl)))


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda repl: repl.replica_id, "replica_id"),
        (
            lambda repl: tf.distribute.get_replica_context().replica_id_in_sync_group,
            "replica_id_in_sync_group",
        ),
    ],
    ids=["replicator", "tf.distribute"],
)
def test_which_replica_it_is_cannot_be_told(ask: Any, what: str) -> None:
    repl = helpers.make(2)
    compiled = jit(lambda: tf.constant(1) + ask(repl))
    with pytest.raises(
        replicator.ContextError,
        match=rf"(?s)asks for {what}, but is traced once for all replicas\."
        rf".*test_compiled.py:\d+.*Fix: pass {what} as a tensor argument",
    ):
        repl.run(lambda: compiled())


def test_one_replica_can_be_told() -> None:
    repl = helpers.make(1)
    compiled = jit(lambda: tf.constant(1) + repl.replica_id)
    assert repl.run(lambda: compiled())[0] == 1


# --- Outside of steps -----------------------------------------------------------------


def test_a_function_of_steps_may_read_outside() -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(VALUE)
    double = jit(lambda: 2.0 * variable)
    repl.run(lambda: double())
    variable.assign(3 * VALUE)
    np.testing.assert_array_equal(double(), 6 * VALUE)


@pytest.mark.parametrize("kind", ["written", "on_read"])
def test_a_function_of_steps_does_no_harm_outside(kind: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        if kind == "written":
            variable = tf.Variable(0, name="count")
            function = jit(lambda: variable.assign_add(1))
        else:
            how = tf.VariableSynchronization.ON_READ
            variable = tf.Variable(0.0, name="count", synchronization=how)
            function = jit(lambda: variable + 1.0)
    repl.run(lambda: function())
    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)traced in a step uses variable count:0 outside any step, where it "
        r"would reach replica 0 only\..*test_compiled.py:\d+.*Fix: create two "
        r"functions",
    ):
        function()


@pytest.mark.mirrored
def test_a_function_from_outside_is_refused_in_steps() -> None:
    repl = helpers.make(2, build="trace")  # clones pass their own
    with repl.context():
        variable = tf.Variable(VALUE, name="weights")
    double = jit(lambda: 2.0 * variable)
    double()
    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)replica \d uses another replica's component of variable weights:0"
        r".*test_compiled.py:\d+.*traced once: create another one to call "
        "outside steps",
    ):
        repl.run(lambda: double())


def test_a_function_differentiated_around_one_that_recomputes_is_refused() -> None:
    """The recomputed part is traced outside of the compiled function, for replica 0."""
    repl = helpers.make(2, variables="mirrored")
    with repl.context():
        variable = tf.Variable(VALUE)
    compiled = jit(tf.recompute_grad(lambda x: tf.reduce_sum(x * variable**2)))

    def step_fn() -> Any:
        with tf.GradientTape() as tape:
            y = compiled(own(repl))
        return tape.gradient(y, variable)

    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)replica \d uses another replica's component.*test_compiled.py:\d+"
        ".*take gradients of tf.recompute_grad inside it",
    ):
        repl.run(step_fn)


@pytest.mark.parametrize("first", ["step", "outside"])
def test_with_one_replica_a_function_may_be_called_anywhere(first: str) -> None:
    repl = helpers.make(1)
    with repl.context():
        variable = tf.Variable(VALUE)
    function = jit(lambda: variable.assign_add(VALUE))

    def step_fn() -> Any:
        return function()

    def run() -> None:
        repl.run(step_fn)

    calls = [run, function] if first == "step" else [function, run]
    for call in calls * 2:
        call()
    np.testing.assert_array_equal(variable, 5 * VALUE)


def test_writes_outside_steps_are_refused() -> None:
    """As where Keras' fit compiles by XLA, which it does on GPUs."""
    repl = helpers.make(2, variables="mirrored")
    with repl.context():
        variable = tf.Variable(VALUE)
    compiled = jit(lambda: variable.assign_add(VALUE))

    @tf.function
    def loop() -> tf.Tensor:
        compiled()
        return variable.read_value()

    with pytest.raises(
        replicator.UnsupportedError,
        match=r"(?s)on 2 devices.*jit_compile=True outside.*test_compiled\.py.*Fix:",
    ):
        loop()
    helpers.assert_replicas_equal([variable])
    np.testing.assert_array_equal(variable.numpy(), VALUE)
