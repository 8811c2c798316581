# SPDX-License-Identifier: Apache-2.0
"""Functions that replicas call: one copy for all, unless they draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist import bodies, stamping

v1 = tf.compat.v1


def _copies(
    make: Callable[[tf.Tensor], tf.Tensor],
    replicas: tuple[int, ...] = (0, 1),
    placed: Callable[[tf.Tensor], str] = lambda tensor: "",
) -> list[tf.Tensor]:
    """Returns results of a function in the default graph, and those of its copies."""
    graph, copier = v1.get_default_graph(), bodies.Bodies("CPU")
    result = tf.function(make, autograph=False)(tf.constant(3.0))
    stamp = stamping.Stamp(graph, [result.op])
    copies = [result]
    for r in replicas:
        new = stamp.press(
            *(graph, f"r{r}/", lambda t: t, lambda op: "", {}),
            lambda op, name, r=r: copier.copy(op, name, r, placed),
        )
        copies.append(stamping.of(new, result))
    return copies


def _called(tensor: tf.Tensor) -> str:
    return tensor.op.get_attr("f").name


def _ops(tensor: tf.Tensor) -> list[tf.Operation]:
    """Returns the ops of the function that computes a tensor, to any depth."""
    stack, result = [tensor.op], []
    while stack:
        for _, body in _tf.called_graphs(stack.pop()):
            result += body.get_operations()
            stack += body.get_operations()
    return result


def test_all_replicas_call_one_copy_that_computes_the_same() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        first, *copies = _copies(lambda x: (x + 1) * x)
        assert session.run([first, *copies]) == [12, 12, 12]
    assert _called(copies[0]) == _called(copies[1]) != _called(first)


def test_random_numbers_are_drawn_by_a_copy_for_each_replica() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(3)
        inner = tf.function(lambda x: x * tf.random.uniform([]))
        _, *copies = _copies(lambda x: inner(x))
        one, two = session.run(copies)
    assert one != two and _called(copies[0]) != _called(copies[1])


def test_what_is_compiled_is_called_as_it_is() -> None:
    with tf.Graph().as_default() as graph:
        result = tf.function(lambda x: x + 1, jit_compile=True)(tf.constant(1.0))
        name = _called(result)
        copier = bodies.Bodies("CPU")
        assert copier.copy(result.op, name, 1, lambda tensor: "") == name
        assert graph is v1.get_default_graph()


def test_a_copy_says_of_no_op_where_it_is_but_for_other_kinds_of_devices() -> None:
    def make(x: tf.Tensor) -> tf.Tensor:
        with tf.device("/CPU:1"):
            x = tf.sqrt(x)
        with tf.device("/GPU:1"):
            return tf.exp(x)

    with tf.Graph().as_default():
        first, copy = _copies(make, (0,))
    devices = {op.type: op.device for op in _ops(copy)}
    assert devices["Sqrt"] == "" and "GPU:1" in devices["Exp"]
    assert "CPU:1" in {op.type: op.device for op in _ops(first)}["Sqrt"]


def test_what_uses_an_owned_variable_is_where_that_is() -> None:
    def copied(device: str) -> dict[str, str]:
        with tf.Graph().as_default():
            v = v1.get_variable("v", [], use_resource=True)

            def make(x: tf.Tensor) -> Any:
                return tf.cond(x > 0, lambda: v + x, lambda: x)

            def placed(tensor: tf.Tensor) -> str:
                return device if tensor is v.handle else ""

            _, copy = _copies(make, (0,), placed)
            return {op.type: op.device for op in _ops(copy)}

    assert copied("/device:CPU:1")["ReadVariableOp"] == "/device:CPU:1"
    assert copied("/device:CPU:1")["AddV2"] == copied("")["ReadVariableOp"] == ""


def test_what_must_run_does_in_copies() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        v = v1.get_variable("v", initializer=1.0, use_resource=True)

        def make(x: tf.Tensor) -> tf.Tensor:
            v.assign_add(x)
            return x

        _, copy = _copies(make, (0,))
        session.run(v.initializer)
        assert session.run(copy) == 3 and session.run(v) == 4
