# SPDX-License-Identifier: Apache-2.0
"""Digests are equal for equal programs, and differ if any part does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from replicator.graph.equal.digests import Digests


def _digest(build: Callable[[tf.Tensor], tf.Tensor]) -> str:
    """Returns the digest of a separate graph."""
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [3])
        return Digests(lambda handle: None).of(build(x))


_PROGRAMS = {
    "sum": lambda x: x + 1.0,
    "constant": lambda x: x + 2.0,
    "op": lambda x: x - 1.0,
    "order": lambda x: 1.0 - x,
    "shape": lambda x: tf.reshape(x, [3, 1]) + 1.0,
    "effect": lambda x: x + tf.random.uniform([3]),
    "branch": lambda x: tf.cond(x[0] > 0, lambda: x, lambda: x + 1.0),
    "other branch": lambda x: tf.cond(x[0] > 0, lambda: x, lambda: x + 2.0),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_program_has_one_digest_and_no_other_has_it(name: str) -> None:
    digest = _digest(_PROGRAMS[name])
    assert digest == _digest(_PROGRAMS[name])
    others = [other for other in _PROGRAMS if other != name]
    assert digest not in [_digest(_PROGRAMS[other]) for other in others]


def test_names_and_devices_do_not_count() -> None:
    def placed(x: tf.Tensor, device: str, name: str) -> tf.Tensor:
        with tf.name_scope(name), tf.device(device):
            return tf.add(x, 1.0, name=name)

    places = (("CPU:0", "one"), ("CPU:1", "other"))
    assert len({_digest(lambda x, p=p: placed(x, *p)) for p in places}) == 1


def test_variables_are_known_by_their_keys() -> None:
    v, w = tf.Variable([1.0]), tf.Variable([1.0])
    keys = {id(v.handle): "first", id(w.handle): "second"}

    def digest(variable: tf.Variable) -> str:
        graph = tf.function(lambda: variable + 1.0).get_concrete_function().graph
        return Digests(lambda handle: keys.get(id(handle))).of(graph.outputs[0])

    assert digest(v) == digest(v) != digest(w)


def test_deep_graphs() -> None:
    def chain(x: tf.Tensor) -> tf.Tensor:
        for _ in range(3000):
            x = tf.sin(x)
        return x

    assert _digest(chain)
