"""Where no primitive may be called, and what the error says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import tensorflow as tf

import replicator
from tests import helpers
from tests.conformance.battery import CASES

Communicate = Callable[[tf.Tensor], tf.Tensor]


@pytest.mark.parametrize("name", CASES)
def test_outside_a_step(name: str) -> None:
    repl = helpers.make(2)
    with pytest.raises(replicator.ContextError, match=r"outside a step.*\nFix: .*step"):
        CASES[name].call(_Anyone(repl), tf.constant([1.0]))


class _Anyone:
    """A Replicator for calls outside of a step, where there is no replica_id."""

    replica_id = 0

    def __init__(self, repl: replicator.Replicator) -> None:
        self._repl = repl

    def __getattr__(self, name: str) -> object:
        return getattr(self._repl, name)


def test_gradient_around_a_step_is_none() -> None:
    """It would be partial for variables; inside the step, gradients are whole."""
    repl = helpers.make(2)

    @tf.function
    def outside() -> tf.Tensor:
        x = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.run(lambda: repl.all_reduce(x))
        assert tape.gradient(y[0], x) is None
        return y[0]

    assert float(outside()) == 2.0


@contextlib.contextmanager
def _v1_control_flow() -> Iterator[None]:
    tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        tf.compat.v1.enable_control_flow_v2()


def _cond(communicate: Communicate, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(x > 0, lambda: communicate(x), lambda: x)


def _while_loop(communicate: Communicate, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda x: x < 9, lambda x: [communicate(x) + 1], [x])[0]


def _switch_case(communicate: Communicate, x: tf.Tensor) -> tf.Tensor:
    return tf.switch_case(tf.cast(x, tf.int32), [lambda: communicate(x), lambda: x])


def _map_fn(communicate: Communicate, x: tf.Tensor) -> tf.Tensor:
    return tf.map_fn(communicate, tf.stack([x, x]))


def _nested_function(communicate: Communicate, x: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda x: communicate(x))(x)


def _autograph_if(communicate: Communicate, x: tf.Tensor) -> tf.Tensor:
    if x > 0:
        x = communicate(x)
    return x


def _autograph_while(communicate: Communicate, x: tf.Tensor) -> tf.Tensor:
    while x < 9:
        x = communicate(x) + 1
    return x


def _autograph_for(communicate: Communicate, x: tf.Tensor) -> tf.Tensor:
    for _ in tf.range(3):
        x = communicate(x)
    return x


def _init_scope(communicate: Communicate, x: tf.Tensor) -> tf.Tensor:
    with tf.init_scope():
        return communicate(tf.constant(1.0))


PLACES = [_cond, _while_loop, _switch_case, _map_fn, _nested_function, _init_scope]
PLACES += [_autograph_if, _autograph_while, _autograph_for]
SAYS = (
    r"(?s)on replica 0 stands inside control flow or a nested function.*"
    r"at tests.\w+.\w+.py:\d+ in .*Fix: .*top level of the step"
)


def _assert_refused(mode: str, place: Callable[..., tf.Tensor], name: str) -> None:
    """Also asserts that the next step runs as if nothing had happened."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        return place(lambda x: CASES[name].call(repl, x), helpers.opaque(1.0))

    with pytest.raises(replicator.ReplicatorError, match=SAYS):
        helpers.run(mode, repl, lambda: step)
    after = helpers.run(mode, repl, lambda: lambda: repl.all_reduce(tf.constant(2.0)))
    assert list(after) == [4.0, 4.0]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_inside_control_flow(place: Callable[..., tf.Tensor]) -> None:
    _assert_refused("eager", place, "sum")


@pytest.mark.parametrize("name", ["broadcast", "stack", "weighted"])
def test_inside_control_flow_any_primitive(name: str) -> None:
    _assert_refused("function", _cond, name)


@pytest.mark.parametrize("v1", [False, True], ids=["v2", "v1"])
@pytest.mark.parametrize("place", [_cond, _while_loop], ids=lambda p: p.__name__)
def test_inside_control_flow_of_a_session(
    place: Callable[..., tf.Tensor], v1: bool
) -> None:
    with _v1_control_flow() if v1 else contextlib.nullcontext():
        _assert_refused("session", place, "sum")


def test_gradient_inside_control_flow() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(1.0)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = repl.all_reduce(x)
        return tf.cond(x > 0, lambda: tape.gradient(y, x), lambda: x)

    with pytest.raises(replicator.ReplicatorError, match=SAYS):
        repl.run(step)


def test_jacobian_is_refused() -> None:
    """It differentiates in a loop."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque([1.0, 2.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x)
        return tape.jacobian(y, x, experimental_use_pfor=False)

    with pytest.raises(replicator.ReplicatorError, match=SAYS):
        repl.run(step)


def _vectorized_map(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    return tf.vectorized_map(repl.all_reduce, x)


def _jacobian(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = repl.all_reduce(x)
    return tape.jacobian(y, x)


@pytest.mark.parametrize("call", [_vectorized_map, _jacobian])
def test_vectorized_loops_fail_by_name_when_run(call: Callable[..., tf.Tensor]) -> None:
    """They copy finished ops into a loop; what they copied must not run silently."""
    repl = helpers.make(2)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r'(?s)"primitive": "all_reduce".*test_refusals.py:\d+ in ',
    ):
        repl.run(lambda: call(repl, helpers.opaque([1.0, 2.0])))


def test_control_flow_without_communication_is_fine() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = repl.all_reduce(helpers.opaque(1.0))
        x = tf.cond(x > 0, lambda: x * 3, lambda: x)
        return repl.all_reduce(_autograph_while(lambda x: x * 2, x))

    # 1 + 1 = 2; * 3 = 6; * 2 + 1 = 13; 13 + 13 = 26
    assert [float(y) for y in repl.run(step)] == [26.0, 26.0]
