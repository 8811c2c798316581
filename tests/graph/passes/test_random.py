# SPDX-License-Identifier: Apache-2.0
"""Every replica draws different random numbers, reproducibly if there is a seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers, sampling

N = 12  # numbers per draw: enough that no two draws agree by chance


@pytest.fixture(autouse=True)
def no_global_seed() -> Iterator[None]:
    """Leaves other tests without a global seed."""
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


@tf.function
def in_function(seed: int | None) -> tf.Tensor:
    return tf.random.normal([N], seed=seed)


@tf.function
def in_function_in_function(seed: int | None) -> tf.Tensor:
    return in_function(seed) * 2.0


def in_cond(seed: int | None) -> tf.Tensor:
    chosen = tf.reduce_sum(tf.ones([3])) > 2.0
    return tf.cond(
        chosen, lambda: tf.random.normal([N], seed=seed), lambda: tf.zeros([N])
    )


def in_while(seed: int | None) -> tf.Tensor:
    def body(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return i + 1, total + tf.random.normal([N], seed=seed)

    return tf.while_loop(lambda i, _: i < 3, body, [0, tf.zeros([N])])[1]


def in_cond_in_while(seed: int | None) -> tf.Tensor:
    def body(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        drawn = tf.cond(i > 0, lambda: in_function(seed), lambda: tf.zeros([N]))
        return i + 1, total + drawn

    return tf.while_loop(lambda i, _: i < 3, body, [0, tf.zeros([N])])[1]


def in_map(seed: int | None) -> tf.Tensor:
    return tf.map_fn(
        lambda _: tf.random.normal([], seed=seed), tf.zeros([N]), parallel_iterations=1
    )


def under_no_device(seed: int | None) -> tf.Tensor:
    with tf.device(None):
        return tf.random.normal([N], seed=seed)


def sampled(seed: int | None) -> tf.Tensor:
    return tf.random.uniform_candidate_sampler(
        tf.constant([[1]], tf.int64), 1, N, True, 10_000, seed=seed
    ).sampled_candidates


def pooled(seed: int | None) -> tf.Tensor:
    images = tf.reshape(tf.range(20.0 * 20), [1, 20, 20, 1])
    ratios = [1.0, 1.44, 1.44, 1.0]
    return tf.nn.fractional_max_pool(images, ratios, True, seed=seed or 7)[1]


DRAWS: dict[str, Callable[[int | None], tf.Tensor]] = {
    "normal": lambda seed: tf.random.normal([N], seed=seed),
    "truncated": lambda seed: tf.random.truncated_normal([N], seed=seed),
    "uniform_int": lambda seed: tf.random.uniform([N], 0, 1000, tf.int32, seed=seed),
    "gamma": lambda seed: tf.random.gamma([N], 2.0, seed=seed),
    "poisson": lambda seed: tf.random.poisson([N], 40.0, seed=seed),
    "categorical": lambda seed: tf.random.categorical(tf.zeros([1, 500]), N, seed=seed),
    "shuffle": lambda seed: tf.random.shuffle(tf.range(50), seed=seed),
    "dropout": lambda seed: tf.nn.dropout(tf.ones([64]), 0.5, seed=seed),
    "crop": lambda seed: tf.image.random_crop(
        tf.reshape(tf.range(40 * 40), [40, 40]), [2, 2], seed=seed
    ),
    "candidates": sampled,
    "pool": pooled,
    "cond": in_cond,
    "while": in_while,
    "cond_in_while": in_cond_in_while,
    "map": in_map,
    "function": in_function,
    "function_in_function": in_function_in_function,
    "no_device": under_no_device,
}


def draw(
    mode: str,
    draws: Callable[[int | None], Any],
    seed: int | None,
    global_seed: int | None = None,
    num_replicas: int = 3,
    steps: int = 1,
) -> list[np.ndarray]:
    """Returns each replica's draws in the last of some steps."""
    repl = helpers.make(num_replicas)

    def make_step() -> Callable[[], Any]:
        tf.random.set_seed(global_seed)
        return lambda: draws(seed)

    return [np.asarray(v) for v in helpers.run(mode, repl, make_step, steps=steps)]


def assert_all_different(values: list[np.ndarray]) -> None:
    for one, other in itertools.combinations(values, 2):
        assert not np.array_equal(one, other)


# A seed of the op, of the program, or both.
SEEDS = [(7, None), (None, 3), (7, 3)]


@pytest.mark.battery(6)
@pytest.mark.parametrize(
    ("name", "mode", "seeds"), sampling.in_turn([*DRAWS], helpers.MODES, SEEDS)
)
def test_replicas_draw_differently_and_the_same_in_each_run(
    name: str, mode: str, seeds: tuple[int | None, int | None]
) -> None:
    runs = [draw(mode, DRAWS[name], *seeds, steps=2) for _ in range(2)]
    assert_all_different(runs[0])
    np.testing.assert_array_equal(*runs)


def test_without_seeds_runs_and_steps_differ() -> None:
    one, other = (draw("eager", DRAWS["normal"], None) for _ in range(2))
    assert_all_different([*one, *other])
    assert_all_different(draw("eager", DRAWS["normal"], 7, steps=1) + one)


def test_replica_0_draws_what_plain_tensorflow_draws() -> None:
    expected = tf.function(lambda: DRAWS["cond_in_while"](7))().numpy()
    np.testing.assert_array_equal(draw("eager", DRAWS["cond_in_while"], 7)[0], expected)
    np.testing.assert_array_equal(
        draw("eager", DRAWS["cond_in_while"], 7, num_replicas=1)[0], expected
    )


def test_gradients_see_the_mask_of_the_forward_pass() -> None:
    repl = helpers.make(2)

    @tf.function
    def dropped(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.dropout(x, 0.5, seed=3)

    def step_fn() -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.ones([64])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = dropped(x)
        return y, tape.gradient(y, x)

    forward, backward = repl.run(step_fn)
    assert_all_different([v.numpy() for v in forward])
    np.testing.assert_array_equal(forward, backward)


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("seed", [None, 5])
def test_generators_draw_differently_and_reproducibly(
    mode: str, seed: int | None
) -> None:
    def make_step() -> Callable[[], Any]:
        if seed is None:
            generator = tf.random.Generator.from_non_deterministic_state()
        else:
            generator = tf.random.Generator.from_seed(seed)

        def step_fn() -> Any:
            seeds = generator.make_seeds(1)[:, 0]
            return (
                generator.normal([N]),
                tf.random.stateless_normal([N], seeds),
                tf.cond(
                    generator.uniform([]) < 2.0,
                    lambda: generator.normal([N]),
                    lambda: tf.zeros([N]),
                ),
            )

        return step_fn

    runs = [helpers.run(mode, helpers.make(3), make_step, steps=2) for _ in range(2)]
    for values in runs[0]:
        assert_all_different(list(values))
    same = np.array_equal(np.asarray(runs[0]), np.asarray(runs[1]))
    assert same == (seed is not None)


@pytest.mark.parametrize("reset", ["reset_from_seed", "reset_from_key_counter"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_a_reset_generator_still_draws_differently(reset: str, inside: bool) -> None:
    repl = helpers.make(2)
    with repl.context():
        generator = tf.random.Generator.from_seed(1)
    arguments = (9,) if reset == "reset_from_seed" else (9, [0, 0])

    def step_fn() -> tf.Tensor:
        if inside:
            getattr(generator, reset)(*arguments)
        return generator.normal([N])

    draws = []
    for _ in range(2):
        if not inside:
            getattr(generator, reset)(*arguments)
        draws.append([v.numpy() for v in repl.run(step_fn)])
    assert_all_different(draws[0])
    np.testing.assert_array_equal(*draws)
    plain = tf.random.Generator.from_seed(1)
    getattr(plain, reset)(*arguments)
    np.testing.assert_array_equal(draws[0][0], plain.normal([N]))


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("seed", [None, 11])
def test_keras_dropout_masks_differ(mode: str, seed: int | None) -> None:
    def make_step() -> Callable[[], Any]:
        tf.keras.utils.set_random_seed(1)
        tf.random.set_seed(None)
        layer = tf.keras.layers.Dropout(0.5, seed=seed)
        noise = tf.keras.layers.GaussianNoise(1.0, seed=seed)
        return lambda: (
            layer(tf.ones([64]), training=True),
            noise(tf.zeros([N]), training=True),
        )

    runs = [helpers.run(mode, helpers.make(3), make_step, steps=2) for _ in range(2)]
    for one, other in zip(*runs, strict=True):
        assert_all_different([np.asarray(v) for v in one])
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def concrete() -> Callable[[], tf.Tensor]:
    return tf.function(lambda: tf.random.normal([N], seed=5)).get_concrete_function()


def compiled() -> Callable[[], tf.Tensor]:
    return tf.function(lambda: tf.random.normal([N], seed=5), jit_compile=True)


def hidden() -> Callable[[], tf.Tensor]:
    def call() -> tf.Tensor:
        with tf.device(None):
            return tf.random.normal([N], seed=5)

    return tf.function(lambda: tf.cond(tf.random.normal([]) > 9, call, call))


@pytest.mark.parametrize("make", [concrete, compiled, hidden])
def test_seeds_that_cannot_be_separated_are_refused(make: Callable[[], Any]) -> None:
    repl = helpers.make(2, build="trace")
    function = make()

    def step_fn() -> tf.Tensor:
        return function()

    with pytest.raises(
        replicator.ReplicatorError,
        match=r"(?s)same random numbers.*RandomStandardNormal.*test_random.py:\d+"
        r".*called at .*test_random.py:\d+ in step_fn.*Fix:.*Generator",
    ):
        repl.run(step_fn)


@pytest.mark.parametrize("make", [concrete, compiled, hidden])
def test_copies_of_functions_have_seeds_of_their_own(make: Callable[[], Any]) -> None:
    function = make()
    repl = helpers.make(3, build="clone")
    assert_all_different([v.numpy() for v in repl.run(lambda: function())])


def test_concrete_functions_without_seeds_are_fine() -> None:
    repl = helpers.make(2)
    function = tf.function(lambda: tf.random.normal([N])).get_concrete_function()
    assert_all_different([v.numpy() for v in repl.run(lambda: function())])


def test_steps_leave_the_seeds_of_the_code_around_alone() -> None:
    repl = helpers.make(2)

    @tf.function
    def around() -> Any:
        inside = repl.run(lambda: tf.random.normal([N], seed=5))
        return inside, in_function(5), tf.random.normal([N], seed=5)

    inside, after, last = around()
    np.testing.assert_array_equal(inside[0], after)
    np.testing.assert_array_equal(inside[0], last)
    assert_all_different([inside[0].numpy(), inside[1].numpy()])
