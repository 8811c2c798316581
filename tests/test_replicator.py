# SPDX-License-Identifier: Apache-2.0
"""The Replicator object, which caches its steps and can be dropped."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import ContextError
from replicator.compressors import all_reduce as compressed
from replicator.primitives import permute
from tests import helpers, sampling


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_knows_its_devices(replicas):
    repl = helpers.make(replicas)
    assert repl.num_replicas == len(repl.devices) == replicas
    assert len(set(repl.devices)) == replicas


def test_its_repr_shows_the_devices_and_where_variables_live():
    shown = repr(helpers.make(2, variables="sharded"))
    assert shown == "Replicator(['CPU:0', 'CPU:1'], variables='sharded')"


# --- Outside and inside ---------------------------------------------------------------

_CALLS = {
    "replica_id": lambda repl: repl.replica_id,
    "weight": lambda repl: repl.weight,
    "all_reduce": lambda repl: repl.all_reduce(1.0),
    "broadcast": lambda repl: repl.broadcast(1.0),
    "all_gather": lambda repl: repl.all_gather(1.0),
}


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("where", ["eager", "function", "context"])
def test_a_replica_exists_in_a_step_only(name, where):
    repl = helpers.make(2)

    def call():
        return _CALLS[name](repl)

    with pytest.raises(
        ContextError, match=f"{name} was called outside a step"
    ) as caught:
        if where == "function":
            tf.function(call)()
        elif where == "context":
            with repl.context():
                call()
        else:
            call()
    assert "Fix: call it inside the step_fn" in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


def test_the_context_may_be_entered_in_a_step_and_twice():
    repl = helpers.make(2, build="trace")
    with repl.context(), repl.context():
        outside = tf.Variable(1.0)
    variables = []

    def step_fn():
        with repl.context():
            variables.append(tf.Variable(2.0))
        return variables[-1] + outside

    assert [float(v) for v in repl.run(step_fn)] == [3.0, 3.0]
    assert variables[0] is variables[1]
    assert len(outside.components) == 2


def test_the_context_is_left_when_its_block_raises():
    repl = helpers.make(2)
    with pytest.raises(KeyError), repl.context():
        raise KeyError
    assert not isinstance(tf.Variable(0), replicator.ReplicatedVariable)


# --- The cache ------------------------------------------------------------------------


class _Model:
    """Has a method that counts how often it is traced."""

    def __init__(self) -> None:
        self.traced = 0

    def step(self, x: tf.Tensor) -> tf.Tensor:
        self.traced += 1
        return x

    def inputs(self) -> tf.data.Dataset:
        return tf.data.Dataset.range(100)


class _Equal:
    """A callable that is equal to all with its number."""

    traced = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        type(self).traced += 1
        return x + self.number

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Equal) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


def test_a_bound_method_is_the_same_step_each_time():
    repl, model = helpers.make(2, build="trace"), _Model()
    for k in range(3):
        values = repl.run(model.step, model.inputs)
        assert [int(v) for v in values] == [2 * k, 2 * k + 1]
    assert model.traced == 2
    other = _Model()
    assert [int(v) for v in repl.run(other.step, other.inputs)] == [0, 1]
    assert (model.traced, other.traced) == (2, 2)


def test_a_callable_object_is_a_step_and_one_that_is_equal_to_it_another():
    repl = helpers.make(2, build="trace")
    inputs = _Model().inputs
    _Equal.traced = 0
    step = _Equal(5)
    for k in range(3):
        values = repl.run(step, inputs)
        assert [int(v) for v in values] == [2 * k + 5, 2 * k + 6]
    assert _Equal.traced == 2
    assert [int(v) for v in repl.run(_Equal(5), inputs)] == [5, 6]
    assert _Equal.traced == 4


def test_equal_partials_are_the_same_step():
    """functools.partial compares by identity; a new equal one continues the step."""
    repl, model = helpers.make(2, build="trace"), _Model()

    def step_fn(scale, x, shift):
        model.traced += 1
        return x * scale + shift

    def input_fn(size):
        return tf.data.Dataset.range(size)

    for k in range(3):
        values = repl.run(
            functools.partial(step_fn, 10, shift=1), functools.partial(input_fn, 100)
        )
        assert [int(v) for v in values] == [20 * k + 1, 20 * k + 11]
    assert model.traced == 2
    values = repl.run(functools.partial(step_fn, 10, shift=2), lambda: input_fn(9))
    assert [int(v) for v in values] == [2, 12]


def test_build_gives_what_run_calls():
    repl, model = helpers.make(2, build="trace"), _Model()
    step = repl.build(model.step, model.inputs)
    assert repl.build(model.step, model.inputs) is step
    assert repl.build(model.step, model.inputs, "per_worker") is not step
    assert [int(v) for v in step()] == [0, 1]
    assert [int(v) for v in repl.run(model.step, model.inputs)] == [2, 3]
    assert model.traced == 2


def test_one_replicator_runs_many_steps_over_the_same_variables():
    """A GAN's two, and evaluation beside them."""
    repl = helpers.make(2)
    with repl.context():
        one, two = tf.Variable(1.0), tf.Variable(10.0)

    def first():
        return one.assign_add(two * repl.all_reduce(1.0, "mean"))

    def second():
        return two.assign_add(one * repl.all_reduce(1.0, "mean"))

    def evaluate():
        return repl.all_reduce(one + two, "sum")

    for _ in range(2):
        repl.run(first)
        repl.run(second)
    assert [float(v) for v in repl.run(evaluate)] == [2 * (32.0 + 53.0)] * 2


def test_two_replicators_of_the_same_devices_keep_to_themselves():
    """Their variables are on the same devices, so either could run them."""
    one, two = helpers.make(2), helpers.make(2)

    def step_fn():
        return tf.Variable(0.0).assign_add(1.0)

    assert [float(v) for v in one.run(step_fn)] == [1.0, 1.0]
    assert [float(v) for v in two.run(step_fn)] == [1.0, 1.0]
    assert [float(v) for v in one.run(step_fn)] == [2.0, 2.0]


_OUTSIDE = {"run", "build", "initialize", "plan", "devices", "num_replicas", "inputs"}
_OUTSIDE |= {"epoch", "select", "strategy", "stages"}
# All that means the step being built. A run in a step is refused on any Replicator; the
# rest of the others are facts.
_IN_A_STEP = sorted(
    {name for name in dir(replicator.Replicator) if name[0] != "_"} - _OUTSIDE
)


def test_primitives_have_the_signatures_of_their_functions():
    repl = helpers.make(1)
    assert list(inspect.signature(repl.shift).parameters) == list(
        inspect.signature(permute.shift).parameters
    )
    assert repl.all_reduce.__doc__ == compressed.all_reduce.__doc__


@pytest.mark.battery(5)
@pytest.mark.parametrize(("name", "others"), sampling.in_turn(_IN_A_STEP, [2, 3]))
def test_a_replicator_is_refused_in_the_step_of_another(name, others):
    one, two = helpers.make(2), helpers.make(others)

    def step_fn():
        value = getattr(two, name)  # if a method: refused whatever its arguments are
        value()

    with pytest.raises(ContextError) as caught:
        one.run(step_fn)
    message = str(caught.value)
    assert f"{name} of the Replicator on {list(two.devices)}" in message
    assert (
        f"replica 0 in a step of another Replicator, on {list(one.devices)}" in message
    )
    assert "test_replicator.py:" in message
    assert f"Fix: call {name} of the Replicator that runs the step" in message


@pytest.mark.parametrize("family", ["keras", "v1"])
def test_an_optimizer_is_refused_where_the_replicator_that_wrapped_it_does_not_run(
    family,
):
    one, two, three = (
        helpers.make(2, build="trace"),
        helpers.make(2, build="trace"),
        helpers.make(3),
    )
    with three.context():
        optimizer = three.wrap_optimizer(
            tf.keras.optimizers.SGD(0.5)
            if family == "keras"
            else tf.compat.v1.train.GradientDescentOptimizer(0.5)
        )
    with two.context():
        variable = tf.Variable(1.0)
        other = two.wrap_optimizer(tf.keras.optimizers.SGD(0.5))

    def step_fn(chosen):
        chosen.apply_gradients([(tf.constant(1.0), variable)])
        return variable.read_value()

    with pytest.raises(
        ContextError, match="was wrapped by the Replicator on"
    ) as caught:
        one.run(functools.partial(step_fn, optimizer))
    assert "Fix: wrap it with wrap_optimizer of the Replicator that runs" in str(
        caught.value
    )
    result = one.run(functools.partial(step_fn, other))  # on the same devices
    assert [float(v) for v in result] == [0.5, 0.5]


# --- Dropped elements -----------------------------------------------------------------


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("fed", [False, True], ids=["alone", "with inputs"])
def test_all_is_freed_when_the_replicator_is_dropped(mode, fed):
    class Probe:
        """An object that step_fn captures."""

    def use() -> list[weakref.ref]:
        repl, probe = helpers.make(2), Probe()
        references = []

        def make_step():
            weight = tf.Variable(1.0)

            def step_fn(*element):
                references.append(tf.Variable(2.0))
                assert probe is not None
                with tf.GradientTape() as tape:
                    loss = repl.all_reduce(weight * 2.0, "sum")
                return tape.gradient(loss, weight.handle)

            references.append(weight)
            return step_fn

        def input_fn():
            return tf.data.Dataset.range(9)

        helpers.run(mode, repl, make_step, input_fn if fed else None)
        return [weakref.ref(x) for x in (repl, probe, *references)]

    held = use()
    for _ in range(3):
        gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_a_graph_is_freed_while_the_replicator_lives_on():
    """The same step in many graphs, as in an old program with a graph per epoch."""
    repl = helpers.make(2)

    def step_fn(x):
        return tf.Variable(1.0) * repl.all_reduce(tf.cast(x, tf.float32), "sum")

    def input_fn():
        return tf.data.Dataset.range(9)

    def use() -> weakref.ref:
        with tf.Graph().as_default() as graph:
            fetches = repl.run(step_fn, input_fn)
            with tf.compat.v1.train.MonitoredSession() as session:
                session.run(fetches)
        return weakref.ref(graph)

    held = use()
    for _ in range(3):
        gc.collect()
    assert held() is None


def test_lambdas_that_hold_different_values_are_different_steps():
    repl = helpers.make(2)

    def holding(value):
        return lambda: tf.constant(value)

    results = [repl.run(lambda k=k: tf.constant(k))[1] for k in range(3)]
    held = [repl.run(holding(k))[0] for k in range(3)]
    assert [int(v) for v in results] == [int(v) for v in held] == [0, 1, 2]


def test_an_unhashable_callable_is_a_step():
    class Step:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self):
            return tf.Variable(7) + 0

    repl, step_fn = helpers.make(2), Step()
    assert repl.build(step_fn) is repl.build(step_fn)
    assert int(repl.run(step_fn)[1]) == 7


def test_a_step_fn_that_is_new_each_time_is_warned_of_once(caplog):
    repl = helpers.make(2)
    for _ in range(8):
        repl.build(lambda: tf.constant(0))
    messages = [
        r.getMessage() for r in caplog.records if "new function" in r.getMessage()
    ]
    assert len(messages) == 1
    assert "test_replicator.py:" in messages[0] and "outside the loop" in messages[0]


# --- Plans ----------------------------------------------------------------------------


def test_the_plan_is_that_of_the_step_built_last() -> None:
    repl = helpers.make(2)
    first = repl.build(lambda: repl.all_reduce(1.0))
    second = repl.build(lambda: repl.broadcast(1.0))
    for step, primitive in ((first, "all_reduce"), (second, "broadcast")):
        step()
        assert repl.plan is step.plan
        assert [row.primitive for row in repl.plan] == [primitive]
    first()  # already built
    assert repl.plan is second.plan


def test_a_build_that_fails_leaves_the_plan_as_it_was() -> None:
    repl = helpers.make(2)
    repl.run(lambda: repl.all_reduce(1.0))
    before = repl.plan
    with pytest.raises(replicator.MismatchError):
        repl.run(lambda: repl.all_reduce(1.0) if repl.replica_id else tf.ones([]))
    assert repl.plan is before


def test_a_plan_before_any_build_is_an_error() -> None:
    repl = helpers.make(2)
    with pytest.raises(replicator.ContextError) as caught:
        _ = repl.plan
    message = str(caught.value)
    assert "the plan was asked for before any step was built" in message
    assert "test_replicator.py:" in message
    assert "Fix: run a step first, or ask for repl.build(step_fn, input_fn)" in message
