"""wrap_optimizer: what it refuses, several optimizers, every kind of step_fn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf

import replicator
from tests import helpers

v1 = tf.compat.v1
kopt = tf.keras.optimizers

UNWRAPPED = {
    "keras": lambda: kopt.SGD(1.0),
    "keras_adam": lambda: kopt.Adam(1.0),
    "loss_scale": lambda: kopt.LossScaleOptimizer(kopt.SGD(1.0)),
    "v1": lambda: v1.train.GradientDescentOptimizer(1.0),
    "v1_adam": lambda: v1.train.AdamOptimizer(1.0),
    "sonnet": lambda: snt.optimizers.SGD(1.0),
    "sonnet_adam": lambda: snt.optimizers.Adam(1.0),
}


def _apply(optimizer: Any, gradient: Any, variable: tf.Variable) -> Any:
    if isinstance(optimizer, v1.train.Optimizer):
        return optimizer.apply_gradients([(gradient, variable)])
    return optimizer.apply([gradient], [variable])


# --- Refused in a step ---------------------------------------------------------------


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", UNWRAPPED)
def test_an_optimizer_that_is_not_wrapped_is_refused(name: str, mode: str) -> None:
    repl = helpers.make(2)
    with pytest.raises(
        replicator.ReplicatorError, match=r"(?s)test_optimizers.py:\d+.*Fix: wrap"
    ):

        def make_step() -> Callable[[], Any]:
            with repl.context():
                w = tf.Variable(1.0)
                optimizer = UNWRAPPED[name]()
            return lambda: _apply(optimizer, tf.constant(1.0 + repl.replica_id), w)

        helpers.run(mode, repl, make_step)


def test_after_an_error_nothing_has_changed_and_later_builds_work() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0)
        plain = kopt.SGD(1.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0, momentum=0.5))
    fail = [True]

    def step_fn() -> tf.Tensor:
        _apply(optimizer, tf.constant(2.0 * repl.replica_id), w)
        if fail[0] and repl.replica_id == 1:
            _apply(plain, tf.constant(1.0), w)
        return w.read_value()

    with pytest.raises(replicator.ContextError, match="SGD updates variable"):
        repl.run(step_fn)
    assert (w.numpy(), optimizer.iterations.numpy()) == (1.0, 0)
    fail[0] = False
    np.testing.assert_array_equal(repl.run(step_fn), [0.0, 0.0])
    assert optimizer.iterations.numpy() == 1
    helpers.assert_replicas_equal([w, *optimizer.variables])


def test_what_the_step_raises_passes_and_changes_nothing() -> None:
    class OwnError(Exception):
        pass

    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))
    fail = [True]

    def step_fn() -> None:
        optimizer.apply([tf.constant(1.0)], [w])
        if fail[0]:
            raise OwnError("own")

    @tf.function
    def train() -> None:
        try:
            repl.run(step_fn)
        except OwnError:
            fail[0] = False
        repl.run(step_fn)

    with pytest.raises(OwnError, match="^own$"):
        repl.run(step_fn)
    assert w.numpy() == 1.0
    train()  # the failed build is in this function's graph, without effect
    assert w.numpy() == 0.0
    assert optimizer.iterations.numpy() == 1


def test_no_gradient_on_any_replica_is_refused_as_without_us() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        repl.run(lambda: optimizer.apply([None], [w]))
    assert optimizer.iterations.numpy() == 0


@pytest.mark.parametrize("same_shapes", [True, False])
def test_variables_in_another_order_are_refused(same_shapes: bool) -> None:
    """Of equal shapes they would pair silently, wrong."""
    repl = helpers.make(2)
    with repl.context():
        a, b = tf.Variable(1.0, name="a"), tf.Variable(1.0, name="b")
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))
    one = tf.constant(1.0)

    def step_fn() -> None:
        if same_shapes:
            order = [b, a] if repl.replica_id else [a, b]
        else:
            order = [a] if repl.replica_id else [a, b]
        optimizer.apply([one] * len(order), order)

    with pytest.raises(
        replicator.MismatchError,
        match=r"(?s)different variables.*replica 0 .*SGD, 2 gradients, of a.*b.* at "
        r"\S*test_optimizers.py:\d+.*replica 1 .*Fix: ",
    ):
        repl.run(step_fn)
    assert (a.numpy(), b.numpy()) == (1.0, 1.0)


def test_optimizers_in_another_order_are_refused() -> None:
    repl = helpers.make(2)
    with repl.context():
        ws = [tf.Variable(1.0), tf.Variable(1.0)]
        optimizers = [repl.wrap_optimizer(kopt.SGD(1.0)) for _ in ws]

    def step_fn() -> None:
        pairs = list(zip(optimizers, ws, strict=True))
        for optimizer, w in reversed(pairs) if repl.replica_id else pairs:
            optimizer.apply([tf.constant(1.0)], [w])

    with pytest.raises(replicator.MismatchError, match="different variables"):
        repl.run(step_fn)


def test_a_weight_goes_with_the_mean_only() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0), op="sum")
    with pytest.raises(
        replicator.ReplicatorError,
        match=r'(?s)SGD was given a weight on replica 0.*op="sum".*test_optimizers.py:'
        r'\d+.*Fix: weights go with op="mean"',
    ):
        repl.run(lambda: optimizer.apply([tf.constant(1.0)], [w], weight=2))


def test_keras_with_nothing_to_apply() -> None:
    """No gradients do nothing; without variables, an unbuilt optimizer knows none."""
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))
    repl.run(lambda: optimizer.apply([], [w]))
    assert optimizer.iterations.numpy() == 0
    with pytest.raises(ValueError, match="must already be built"):
        repl.run(lambda: optimizer.apply([tf.constant(1.0)]))
    optimizer.build([w])
    repl.run(lambda: optimizer.apply([tf.constant(0.5 + repl.replica_id)]))
    assert w.numpy() == 0.0


@pytest.mark.parametrize("count", [1, 3])
def test_keras_number_of_gradients(count: int) -> None:
    repl = helpers.make(2)
    with repl.context():
        ws = [tf.Variable(1.0), tf.Variable(1.0)]
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))
        optimizer.build(ws)
    grads = [tf.constant(1.0)] * count
    for variables in ([ws], []):
        with pytest.raises(
            replicator.ReplicatorError,
            match=rf"(?s)SGD was given {count} gradients for 2 variables.*Fix: ",
        ):
            repl.run(lambda v=variables: optimizer.apply(grads, *v))


@pytest.mark.parametrize(
    "option", [{"gradient_accumulation_steps": 2}, {"ema_overwrite_frequency": 2}]
)
@pytest.mark.parametrize("scaled", [False, True])
def test_keras_options_that_a_graph_loses_are_refused_there(
    option: dict[str, int], scaled: bool
) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        with repl.context():
            w = tf.Variable(1.0)
            optimizer = kopt.SGD(1.0, use_ema=True, **option)
            if scaled:
                optimizer = kopt.LossScaleOptimizer(optimizer)
            optimizer = repl.wrap_optimizer(optimizer)
        return lambda: optimizer.apply([tf.constant(1.0)], [w])

    (name,) = option
    with pytest.raises(
        replicator.ReplicatorError,
        match=rf"(?s){name} \(of SGD\) has no effect.*test_optimizers.py:\d+.*Fix: ",
    ):
        helpers.run("session", repl, make_step)


# --- Refused by wrap_optimizer -------------------------------------------------------


@pytest.mark.parametrize("op", ["max", "Mean", None])
def test_bad_op(op: Any) -> None:
    with pytest.raises(
        replicator.ReplicatorError, match=rf"op={op!r}.*Fix: op is one of mean, sum"
    ):
        helpers.make(1).wrap_optimizer(kopt.SGD(), op=op)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, None, "2"])
def test_bad_accumulation_steps(steps: Any) -> None:
    with pytest.raises(
        replicator.ReplicatorError,
        match=rf"accumulation_steps={steps!r}.*Fix: .*positive int",
    ):
        helpers.make(1).wrap_optimizer(kopt.SGD(), accumulation_steps=steps)


@pytest.mark.parametrize("thing", ["sgd", None, kopt.SGD, tf.Module()], ids=str)
def test_not_an_optimizer(thing: Any) -> None:
    with pytest.raises(
        replicator.ReplicatorError,
        match=f"was given {type(thing).__name__}.*Fix: .*Keras 3.*all_reduce",
    ):
        helpers.make(1).wrap_optimizer(thing)


@pytest.mark.parametrize("name", UNWRAPPED)
def test_wrapped_twice(name: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        optimizer = repl.wrap_optimizer(UNWRAPPED[name]())
    with pytest.raises(replicator.ReplicatorError, match="wrapped already.*Fix: wrap"):
        repl.wrap_optimizer(optimizer)


@pytest.mark.parametrize("name", ["keras", "loss_scale", "sonnet_adam"])
def test_made_outside_the_context(name: str) -> None:
    optimizer = UNWRAPPED[name]()
    with pytest.raises(
        replicator.ContextError,
        match=rf"(?s){type(optimizer).__name__} holds variable .*outside of the context"
        r".*test_optimizers.py:\d+.*Fix: .*repl.context",
    ):
        helpers.make(2).wrap_optimizer(optimizer)


@pytest.mark.parametrize("name", ["v1_adam", "sonnet"])
def test_without_variables_it_may_be_made_anywhere(name: str) -> None:
    repl = helpers.make(2)
    optimizer = repl.wrap_optimizer(UNWRAPPED[name]())
    with repl.context():
        w = tf.Variable(2.0)

    def step_fn() -> None:
        _apply(optimizer, tf.constant(0.5 + repl.replica_id), w)

    repl.run(step_fn)
    np.testing.assert_allclose(w.numpy(), 1.0, rtol=1e-6)
    helpers.assert_replicas_equal([w])


def test_variables_made_outside_the_context_are_refused_in_the_step() -> None:
    repl = helpers.make(2)
    w = tf.Variable(1.0)
    optimizer = repl.wrap_optimizer(snt.optimizers.SGD(1.0))
    with pytest.raises(replicator.ContextError, match="made outside of the context"):
        repl.run(lambda: optimizer.apply([tf.constant(1.0)], [w]))
    assert w.numpy() == 1.0


# --- Several optimizers, slots, learning rates ---------------------------------------


def test_two_optimizers_over_the_same_variables() -> None:
    """As in a GAN that steps by turns; and both in one step."""
    repl = helpers.make(2)

    def losses(a: Any, b: Any, x: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.reduce_mean((a * b - x) ** 2), -tf.reduce_mean(a + b * x)

    def make() -> tuple[list[tf.Variable], list[Any]]:
        variables = [tf.Variable(np.float64(1.0)), tf.Variable(np.float64(2.0))]
        return variables, [kopt.Adam(0.5), kopt.SGD(0.25, momentum=0.5)]

    def update(variables: Any, optimizers: Any, x: Any) -> None:
        for which, optimizer in enumerate(optimizers):
            with tf.GradientTape() as tape:
                loss = losses(*variables, x)[which]
            optimizer.apply(tape.gradient(loss, variables), variables)

    with repl.context():
        own, optimizers = make()
        optimizers = [repl.wrap_optimizer(optimizer) for optimizer in optimizers]
    plain, plain_optimizers = make()
    xs = np.arange(8.0)

    def both() -> None:
        r = repl.replica_id
        update(own, optimizers, tf.constant(xs[4 * r : 4 * r + 4]))

    def second() -> None:
        x = tf.constant(xs[repl.replica_id :: 2])
        with tf.GradientTape() as tape:
            loss = losses(*own, x)[1]
        optimizers[1].apply(tape.gradient(loss, own), own)

    @tf.function
    def plain_second() -> None:
        with tf.GradientTape() as tape:
            loss = losses(*plain, tf.constant(xs))[1]
        plain_optimizers[1].apply(tape.gradient(loss, plain), plain)

    plain_both = tf.function(lambda: update(plain, plain_optimizers, tf.constant(xs)))
    for _ in range(3):
        repl.run(both)
        repl.run(second)
        plain_both()
        plain_second()
    for one, two in zip(own, plain, strict=True):
        np.testing.assert_allclose(one.numpy(), two.numpy(), rtol=1e-10)
    helpers.assert_replicas_equal(own)


def test_slots_of_a_v1_optimizer_are_one_per_variable_across_builds() -> None:
    """Variables that later builds of one step_fn use get slots of their own."""
    repl = helpers.make(2)
    with repl.context():
        ws = [tf.Variable(0.0), tf.Variable(0.0), tf.Variable(0.0)]
        optimizer = repl.wrap_optimizer(v1.train.MomentumOptimizer(1.0, 0.5))
    used = [0]

    def step_fn() -> None:
        one = tf.constant(1.0)
        optimizer.apply_gradients([(one, ws[k]) for k in used])

    for used[:] in ([0], [0, 1], [2]):
        tf.function(lambda: repl.run(step_fn))()
    slots = [optimizer.get_slot(w, "momentum") for w in ws]
    assert len({id(slot) for slot in slots}) == 3
    assert [w.numpy() for w in ws] == [-2.5, -1.0, -1.0]


def test_learning_rate_between_steps() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(0.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))
    step = repl.build(lambda: optimizer.apply([tf.constant(1.0)], [w]))
    step()
    optimizer.learning_rate = 10.0
    step()
    optimizer.learning_rate.assign(100.0)
    step()
    assert w.numpy() == -111.0
    helpers.assert_replicas_equal([w, *optimizer.variables])


def test_learning_rate_in_the_step() -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(0.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0))

    def step_fn() -> None:
        optimizer.apply([tf.constant(1.0)], [w])
        optimizer.learning_rate = optimizer.learning_rate * 10.0

    for _ in range(3):
        repl.run(step_fn)
    assert w.numpy() == -111.0
    helpers.assert_replicas_equal([w, *optimizer.variables])


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("clip", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_clipping_sees_the_combined_gradient(clip: str, op: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(0.0)
        optimizer = repl.wrap_optimizer(kopt.SGD(1.0, **{clip: 1.5}), op=op)
    # Clipped alone: 1.5 and -1.0.
    gradient = [4.0, -1.0]
    repl.run(lambda: optimizer.apply([tf.constant(gradient[repl.replica_id])], [w]))
    assert w.numpy() == -1.5  # of 1.5, and of 3


# --- Every kind of step_fn -----------------------------------------------------------


class _Trainer:
    """Has a bound method, a decorated one, and is callable itself."""

    def __init__(self, repl: replicator.Replicator) -> None:
        self.repl = repl
        with repl.context():
            self.w = tf.Variable(np.float64(0.0))
            self.optimizer = repl.wrap_optimizer(kopt.SGD(1.0))

    def method(self, x: tf.Tensor, factor: float = 1.0) -> tf.Tensor:
        self.optimizer.apply([x * factor], [self.w])
        return self.repl.all_reduce(x)

    __call__ = method

    @tf.function
    def decorated(self, x: tf.Tensor) -> tf.Tensor:
        return self.method(x)

    @staticmethod
    def static(trainer: _Trainer, x: tf.Tensor) -> tf.Tensor:
        return trainer.method(x)


KINDS: dict[str, Callable[[_Trainer], Callable[..., Any]]] = {
    "bound_method": lambda t: t.method,
    "callable_object": lambda t: t,
    "partial": lambda t: functools.partial(t.method, factor=1.0),
    "partial_of_static": lambda t: functools.partial(_Trainer.static, t),
    "tf_function": lambda t: tf.function(t.method),
    "decorated_method": lambda t: t.decorated,
    "lambda": lambda t: lambda x: t.method(x),
}


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_works_with_every_kind_of_step_fn(kind: str, mode: str) -> None:
    repl = helpers.make(2)
    trainer = _Trainer(repl)
    step_fn = KINDS[kind](trainer)

    def input_fn() -> tf.data.Dataset:
        return helpers.untuned(tf.data.Dataset.from_tensor_slices(np.arange(4.0)))

    call = repl.build(step_fn, input_fn)
    if mode == "function":
        call = tf.function(lambda: repl.run(step_fn, input_fn))
    np.testing.assert_array_equal(call(), [1.0, 1.0])
    np.testing.assert_array_equal(call(), [5.0, 5.0])
    assert trainer.w.numpy() == -(0.5 + 2.5)
    helpers.assert_replicas_equal([trainer.w])


def test_a_bound_method_is_built_once() -> None:
    trainer = _Trainer(helpers.make(2))
    assert trainer.repl.build(trainer.method) is trainer.repl.build(trainer.method)
