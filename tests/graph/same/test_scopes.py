# SPDX-License-Identifier: Apache-2.0
"""Keys are equal for equal programs, and differ if any part does."""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.graph.same.keys import OWN, Key
from replicator.graph.same.scopes import Outside, Scope
from tests import helpers


def _key(build: Callable[[tf.Tensor], tf.Tensor]) -> Key:
    """Returns the key of a result of a graph of its own, as in another process."""
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [3])
        return Scope(Outside(lambda handle: None, 2, between=True)).of(build(x))


_PROGRAMS = {
    "sum": lambda x: x + 1.0,
    "constant": lambda x: x + 2.0,
    "op": lambda x: x - 1.0,
    "order": lambda x: 1.0 - x,
    "shape": lambda x: tf.reshape(x, [3, 1]) + 1.0,
    "branch": lambda x: tf.cond(x[0] > 0, lambda: x, lambda: x + 1.0),
    "other branch": lambda x: tf.cond(x[0] > 0, lambda: x, lambda: x + 2.0),
    "other condition": lambda x: tf.cond(x[0] > 1, lambda: x, lambda: x + 2.0),
    "loop": lambda x: _loop(x, 3, 1.0),
    "more turns": lambda x: _loop(x, 4, 1.0),
    "other turns": lambda x: _loop(x, 3, 2.0),
    "other start": lambda x: _loop(x + 1.0, 3, 1.0),
    "function": lambda x: tf.function(lambda x: x + 1.0)(x),
    "other function": lambda x: tf.function(lambda x: x + 2.0)(x),
}


def _loop(x: tf.Tensor, turns: int, step: float) -> tf.Tensor:
    return tf.while_loop(
        lambda n, y, z: n < turns, lambda n, y, z: (n + 1, y + z, z * step), [0, x, x]
    )[1]


@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_program_has_one_key_and_no_other_has_it(name: str) -> None:
    key = _key(_PROGRAMS[name])
    assert key == _key(_PROGRAMS[name]) and not key.open
    others = [other for other in _PROGRAMS if other != name]
    assert key not in [_key(_PROGRAMS[other]) for other in others]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: x + tf.random.uniform([3]),
        lambda x: tf.cond(x[0] > 0, lambda: x, lambda: tf.random.uniform([3])),
        lambda x: tf.function(lambda x: x + tf.random.uniform([3]))(x),
        lambda x: _loop(tf.random.uniform([3]), 3, 1.0),
    ],
    ids=["effect", "branch", "function", "loop"],
)
def test_what_is_unknown_is_known_to_be(build: Callable[[tf.Tensor], Any]) -> None:
    assert _key(build).open == OWN and _key(build) != _key(build)


def test_names_and_devices_do_not_count() -> None:
    def placed(x: tf.Tensor, device: str, name: str) -> tf.Tensor:
        with tf.name_scope(name), tf.device(device):
            return tf.add(x, 1.0, name=name)

    places = (("CPU:0", "one"), ("CPU:1", "other"))
    assert len({_key(lambda x, p=p: placed(x, *p)) for p in places}) == 1


def test_variables_are_known_by_their_keys() -> None:
    v, w = tf.Variable([1.0]), tf.Variable([1.0])
    named = {
        id(variable.handle): types.SimpleNamespace(key=key)
        for variable, key in ((v, "first"), (w, "second"))
    }

    def key(read: Callable[[], tf.Tensor]) -> Key:
        graph = tf.function(read).get_concrete_function().graph
        scope = Scope(Outside(lambda handle: named.get(id(handle)), 2, between=True))
        return scope.of(graph.outputs[0])

    def again() -> tf.Tensor:
        v.assign(v + 1.0)
        return v + 1.0

    first = key(lambda: v + 1.0)
    assert first == key(lambda: v + 1.0) != key(lambda: w + 1.0)
    assert first != key(again)


def test_deep_graphs() -> None:
    def chain(x: tf.Tensor) -> tf.Tensor:
        for _ in range(3000):
            x = tf.sin(x)
        return x

    assert _key(chain)


def _random(seed: int, replica_id: int) -> list[tf.Tensor]:
    """Returns the values of a random program, which each replica changes a little."""
    common, own = random.Random(seed), random.Random(f"{seed} {replica_id}")

    def pick(choices: Any) -> Any:
        choice, other = common.choice(choices), own.choice(choices)
        return other if own.random() < 0.03 else choice

    values = [tf.constant(0.5), tf.constant(2.0), helpers.opaque(1.0 + replica_id)]

    def one() -> tf.Tensor:
        return pick(values[-6:])

    def add(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return pick([tf.sin, tf.cos])(pick([tf.add, tf.subtract])(x, y))

    def branch() -> tf.Tensor:
        a, b, x, y = one(), one(), one(), one()
        return tf.cond(a < b, lambda: add(x, y), lambda: pick([x, y]) * 2.0)

    def loop() -> tf.Tensor:
        turns, a, start = pick([2, 3]), one(), [one(), one(), one()]
        order = pick(list(itertools.product(range(3), repeat=3)))

        def body(n: tf.Tensor, *xs: tf.Tensor) -> Any:
            x, y, z = (xs[k] for k in order)
            inner = tf.while_loop(
                lambda k, _: k < n, lambda k, w: (k + 1, add(w, x)), [0, z]
            )
            return n + 1, add(x, a), y, inner[1] if pick([True, False]) else z

        results = tf.while_loop(lambda n, *_: n < turns, body, [0, *start])
        return results[1 + pick(range(3))]

    def function() -> tf.Tensor:
        x, y = one(), one()
        called = tf.function(lambda x: add(x, y), autograph=False)
        return add(called(x), called(y))

    for _ in range(12):
        values.append(pick([lambda: add(one(), one()), branch, loop, function])())
    return values


def test_values_of_equal_keys_are_equal_in_random_programs() -> None:
    equal = 0
    for seed in range(30):
        with tf.Graph().as_default():
            replicas = [_random(seed, r) for r in range(2)]
            scope = Scope(Outside(lambda handle: None, 2))
            keys = [[scope.of(x).digest for x in values] for values in replicas]
            with tf.compat.v1.Session() as session:
                results = session.run(replicas)
        pairs = zip(sum(keys, []), sum(results, []), strict=True)
        known: dict[bytes, float] = {}
        for key, result in pairs:
            assert known.setdefault(key, result) == result, seed
        equal += sum(a == b for a, b in zip(*keys, strict=True))
    assert equal > 50
