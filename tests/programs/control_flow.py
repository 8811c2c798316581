# SPDX-License-Identifier: Apache-2.0
"""Communication inside conditionals, loops and functions, with its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.programs.elementwise import (
    World,
    by_persistent_tape,
    by_tf_gradients,
    elementwise,
)
from tests.programs.program import NO_SESSION, ONE_PROCESS

# --- Conditionals ---------------------------------------------------------------------


@elementwise()
def one_branch(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        world.total(x) > -100.0, lambda: world.all_reduce(x) * x, lambda: x * 2.0
    )


@elementwise()
def other_branch(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        world.known(False), lambda: x * 2.0, lambda: world.gathered(x * x) * x
    )


@elementwise()
def both_branches(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        world.known(True),
        lambda: world.all_reduce(world.first(x) * x) + x,
        lambda: world.gathered(x),
    )


@elementwise()
def neither_taken(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(world.known(False), lambda: world.all_reduce(x), lambda: x * x)


@elementwise()
def in_the_predicate(world: World, x: tf.Tensor) -> tf.Tensor:
    largest = world.all_reduce(tf.reduce_max(x, -1, keepdims=True) * 0.0 + 1.0, "max")
    pred = tf.reduce_max(largest) > 0.0
    return tf.cond(pred, lambda: world.first(x) * x, lambda: x)


@elementwise()
def case(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.case(
        [
            (world.known(False), lambda: x),
            (world.known(True), lambda: world.all_reduce(tf.sin(x)) * x),
        ],
        default=lambda: world.first(x),
    )


@elementwise()
def switch_case(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.switch_case(
        world.known(1),
        [
            lambda: x,
            lambda: world.all_reduce(tf.sin(x)) * x,
            lambda: world.first(world.gathered(x)),
        ],
    )


# --- Loops ----------------------------------------------------------------------------


@elementwise()
def loop_body(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda n, x: n < 3,
        lambda n, x: (n + 1, tf.sin(world.all_reduce(x)) * x + x),
        [tf.constant(0), x],
    )[1]


@elementwise()
def loop_condition(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda x: world.total(x * x) < 20.0, lambda x: (1.5 * x * x + x,), [x]
    )[0]


@elementwise()
def loop_body_and_condition(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda x: world.total(x * x) < 20.0,
        lambda x: (1.5 * x + tf.sin(world.first(x)) + world.gathered(x),),
        [x],
    )[0]


@elementwise()
def loop_without_iterations(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda n, x: n < 0,
        lambda n, x: (n + 1, world.all_reduce(x)),
        [world.known(0), x * x],
    )[1]


@elementwise()
def loop_of_at_most(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(
        lambda n, x: n < 7,
        lambda n, x: [n + 1, tf.sin(world.all_reduce(x, "mean")) * x + x],
        [world.known(0), x],
        maximum_iterations=3,
    )[1]


@elementwise()
def loop_with_captures(world: World, x: tf.Tensor) -> tf.Tensor:
    total = world.all_reduce(x)
    return tf.while_loop(
        lambda n, y: n < 2,
        lambda n, y: (n + 1, y * total + world.all_reduce(x * y) + world.first(total)),
        [tf.constant(0), x],
    )[1]


# --- tf.map_fn, tf.scan and tf.foldl --------------------------------------------------


def _stack(x: tf.Tensor) -> tf.Tensor:
    return tf.stack([x, 2.0 * x, 3.0 * x])


@elementwise()
def map_fn(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.map_fn(lambda x: world.all_reduce(x * x) * x, _stack(x)), 0)


@elementwise()
def scan(world: World, x: tf.Tensor) -> tf.Tensor:
    def turn(a: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        return 0.5 * a + world.gathered(x * x) * x

    return tf.reduce_sum(tf.scan(turn, _stack(x), initializer=x), 0)


@elementwise()
def foldl(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.foldl(lambda a, x: 0.5 * a + world.all_reduce(x * a) * x, _stack(x))


@elementwise()
def foldr(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.foldr(lambda a, x: 0.5 * a + world.first(x * x) * a, _stack(x))


# --- Functions ------------------------------------------------------------------------


def _square(world: World) -> Callable[[tf.Tensor], tf.Tensor]:
    return tf.function(lambda x: world.all_reduce(x * x) * x)


@elementwise()
def function_once(world: World, x: tf.Tensor) -> tf.Tensor:
    return _square(world)(x)


@elementwise()
def function_twice(world: World, x: tf.Tensor) -> tf.Tensor:
    function = _square(world)
    return function(x) + function(x * 0.5)


@elementwise()
def function_of_its_own_result(world: World, x: tf.Tensor) -> tf.Tensor:
    function = _square(world)
    return function(function(x))


@elementwise()
def functions_three_deep(world: World, x: tf.Tensor) -> tf.Tensor:
    inner = _square(world)
    middle = tf.function(lambda x: inner(x) + world.first(x))
    outer = tf.function(lambda x: middle(x) * inner(x * 0.1) + world.gathered(x))
    return outer(x) + inner(x)


@elementwise()
def function_recursive(world: World, x: tf.Tensor) -> tf.Tensor:
    @tf.function
    def function(depth: int, x: tf.Tensor) -> tf.Tensor:
        return x if depth == 0 else world.all_reduce(function(depth - 1, x) * x)

    return function(3, x)


@elementwise(ONE_PROCESS)  # a tensor of unknown rank
def function_with_a_signature(world: World, x: tf.Tensor) -> tf.Tensor:
    spec = [tf.TensorSpec(None, tf.float64)]
    function = tf.function(lambda x: world.first(x * x) * x, input_signature=spec)
    return function(x) + function(2.0 * x)


@elementwise()
def function_linear(world: World, x: tf.Tensor) -> tf.Tensor:
    """Its gradient needs none of the function's intermediate values."""
    function = tf.function(world.all_reduce)
    return function(x) + function(x * x)


@elementwise()
def function_whose_root_needs_nothing(world: World, x: tf.Tensor) -> tf.Tensor:
    """The root's process sends all the same, or others would wait for ever."""
    function = tf.function(lambda x: world.first(x * x))
    return world.all_reduce(function(x) * x)


# --- Gradients of the user's own ------------------------------------------------------


@elementwise()
def custom_gradient(world: World, x: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def function(x: tf.Tensor) -> Any:
        def backward(d: tf.Tensor) -> tf.Tensor:
            return world.all_reduce(d) * tf.cos(x) * 3.0

        return world.all_reduce(tf.sin(x)), backward

    return function(x) * x


@elementwise()
def custom_gradient_in_a_function(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.function(lambda x: custom_gradient(world, x))(x)


# --- Control flow inside control flow -------------------------------------------------


def _turn(world: World, n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Takes the two branches alternately."""
    x = tf.cond(
        tf.equal(n % 2, 0),
        lambda: world.all_reduce(x) * 0.3 * x + x,
        lambda: world.first(x) * x,
    )
    return n + 1, x


@elementwise()
def conditional_in_loop(world: World, x: tf.Tensor) -> tf.Tensor:
    start = tf.constant(0)
    return tf.while_loop(
        lambda n, x: n < 3, lambda n, x: _turn(world, n, x), [start, x]
    )[1]


@elementwise()
def loop_in_conditional(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        world.known(True),
        lambda: tf.while_loop(
            lambda n, x: n < 2,
            lambda n, x: (n + 1, world.all_reduce(x) * 0.3 * x + x),
            [tf.constant(0), x],
        )[1],
        lambda: x,
    )


@elementwise()
def loop_in_loop(world: World, x: tf.Tensor) -> tf.Tensor:
    def turn(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.while_loop(
            lambda m, x: m < n + 1,
            lambda m, x: (m + 1, tf.sin(world.all_reduce(x)) * 0.3 * x + x),
            [tf.constant(0), x],
        )[1]
        return n + 1, x * 1.1

    return tf.while_loop(lambda n, x: n < 2, turn, [tf.constant(0), x])[1]


@elementwise()
def function_in_loop(world: World, x: tf.Tensor) -> tf.Tensor:
    function = tf.function(lambda x: tf.sin(world.all_reduce(x * x)) * x)
    return tf.while_loop(
        lambda n, x: n < 2,
        lambda n, x: (n + 1, function(x) + function(0.5 * x)),
        [tf.constant(0), x],
    )[1]


@elementwise()
def four_deep(world: World, x: tf.Tensor) -> tf.Tensor:
    """A conditional in a loop in a function in a scan."""
    function = tf.function(lambda x: conditional_in_loop(world, x))
    stacked = tf.stack([x, 2.0 * x])
    return tf.scan(lambda a, x: a * 0.5 + function(x), stacked, initializer=x)[-1]


# --- Python's own control flow, which AutoGraph converts ------------------------------


@elementwise(NO_SESSION)
def if_else(world: World, x: tf.Tensor) -> tf.Tensor:
    if world.known(True):
        x = world.all_reduce(x) * x
    else:
        x = world.first(x)
    return x


@elementwise(NO_SESSION)
def if_with_return(world: World, x: tf.Tensor) -> tf.Tensor:
    if world.total(x * x) > 1000.0:
        return world.gathered(x)
    y = world.first(x)
    return y * x


@elementwise(NO_SESSION)
def for_range(world: World, x: tf.Tensor) -> tf.Tensor:
    for k in tf.range(3):
        x = x + tf.sin(world.all_reduce(x)) * tf.cast(k, x.dtype)
    return x


@elementwise(NO_SESSION)
def for_with_break_and_continue(world: World, x: tf.Tensor) -> tf.Tensor:
    for k in tf.range(4):
        if k == 1:
            continue
        if k == 3:
            break
        x = x + tf.sin(world.all_reduce(x))
    return x


@elementwise(NO_SESSION)
def for_over_a_tensor(world: World, x: tf.Tensor) -> tf.Tensor:
    y = x
    for factor in tf.stack([world.total(x), 2.0 * world.total(x)]):
        y = y + tf.sin(world.all_reduce(x * factor))
    return y


@elementwise(NO_SESSION)
def python_while(world: World, x: tf.Tensor) -> tf.Tensor:
    n = world.known(0)
    while world.total(x * x) < 20.0 and n < 3:
        x = x * 1.5 + tf.sin(world.all_reduce(x))
        n += 1
    return x


@elementwise()
def for_range_in_a_function(world: World, x: tf.Tensor) -> tf.Tensor:
    """AutoGraph converts it in a session, too."""
    return tf.function(lambda x: for_range(world, x))(x)


# --- Results that are returned as they are --------------------------------------------
# Two tapes wrap each conditional and loop in a function. Unless the gradient needs a
# value computed inside, that function's graph does not know the branches and bodies.


@elementwise()
def result_of_a_branch(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        world.known(True), lambda: world.all_reduce(x), lambda: world.gathered(x)
    )


@elementwise()
def result_of_a_case(world: World, x: tf.Tensor) -> tf.Tensor:
    cases = [
        (world.known(False), lambda: world.first(-x)),
        (world.known(True), lambda: world.first(x)),
    ]
    return tf.case(cases, lambda: world.all_reduce(x))


@elementwise()
def result_of_a_switch(world: World, x: tf.Tensor) -> tf.Tensor:
    branches = [lambda: world.all_reduce(-x), lambda: world.all_reduce(x)]
    return tf.switch_case(world.known(1), branches)


@elementwise()
def result_of_a_loop(world: World, x: tf.Tensor) -> tf.Tensor:
    """Its condition communicates, too."""
    return tf.while_loop(
        lambda k, _: world.total(0.0 * x) + tf.cast(k, x.dtype) < 1.0,
        lambda k, _: (k + 1, world.all_reduce(x)),
        (world.known(0), tf.zeros_like(x)),
    )[1]


@elementwise()
def result_of_a_loop_in_a_branch_in_a_function(world: World, x: tf.Tensor) -> tf.Tensor:
    return tf.function(
        lambda x: tf.cond(
            world.known(True),
            lambda: result_of_a_loop(world, x),
            lambda: result_of_a_branch(world, x),
        ),
        autograph=False,
    )(x)


# --- Other ways to differentiate ------------------------------------------------------

for _function in (loop_with_captures, function_twice):
    _name = _function.__name__
    elementwise(ONE_PROCESS, by=by_persistent_tape, name=f"{_name}_by_persistent_tape")(
        _function
    )
    elementwise(by=by_tf_gradients, name=f"{_name}_by_tf_gradients")(_function)


def _recomputed(place: str) -> Callable[[World, tf.Tensor], tf.Tensor]:
    def function(world: World, x: tf.Tensor) -> tf.Tensor:
        call = tf.recompute_grad(lambda x: world.all_reduce(tf.sin(x)) * x)
        if place == "conditional":
            return tf.cond(world.known(True), lambda: call(x), lambda: x)
        if place == "loop":
            start = [tf.constant(0), x]
            return tf.while_loop(
                lambda n, x: n < 2, lambda n, x: (n + 1, call(x)), start
            )[1]
        return tf.function(call)(x) if place == "function" else call(x)

    return function


for _place in ("step", "conditional", "loop", "function"):  # it has no second one
    elementwise(order=1, name=f"recomputed_in_a_{_place}")(_recomputed(_place))
