# SPDX-License-Identifier: Apache-2.0
"""Programs that differ between hosts; each returns the errors there.

Each function of CASES takes a Replicator of two replicas and the host's number. On host
1 it does something else than on host 0, or something that is refused.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import replicator
from replicator import Replicator


def number_of_calls(repl: Replicator, host: int) -> None:
    def step_fn() -> tf.Tensor:
        x = repl.all_reduce(tf.zeros([2]))
        return repl.all_reduce(x) if host else x

    repl.run(step_fn)


def shape(repl: Replicator, host: int) -> None:
    repl.run(lambda: repl.all_reduce(tf.zeros([2 + host])))


def reduction(repl: Replicator, host: int) -> None:
    repl.run(lambda: repl.all_reduce(tf.zeros([2]), "max" if host else "sum"))


def conditional(repl: Replicator, host: int) -> None:
    def step_fn() -> tf.Tensor:
        x = tf.ones([2])
        if host:
            return tf.cond(x[0] > 0.0, lambda: repl.all_reduce(x), lambda: x)
        return repl.all_reduce(x)

    repl.run(step_fn)


def variable(repl: Replicator, host: int) -> None:
    with repl.context():
        v, w = tf.Variable(1.0, name="v"), tf.Variable(1.0, name="w")
    repl.run(lambda: (w if host else v).assign_add(repl.replica_id + 1.0))


def new_variable(repl: Replicator, host: int) -> None:
    with repl.context():
        tf.Variable(tf.zeros([3 + host]), name="kernel")


def step_fn_raises(repl: Replicator, host: int) -> None:
    def step_fn() -> tf.Tensor:
        if host:
            raise KeyError("no such feature")
        return repl.all_reduce(1.0)

    repl.run(step_fn)


def input_fn_raises(repl: Replicator, host: int) -> None:
    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        if host:
            raise OSError("no such file")
        return tf.data.Dataset.range(4)

    repl.run(lambda x: repl.all_reduce(x), input_fn)


def one_step_more(repl: Replicator, host: int) -> None:
    if host:
        repl.run(lambda: repl.all_reduce(1.0))
    with repl.context():
        tf.Variable(1.0)


def another_step(repl: Replicator, host: int) -> None:
    def first() -> tf.Tensor:
        return repl.all_reduce(1.0)

    def second() -> tf.Tensor:
        return repl.all_reduce(1.0)

    repl.run(second if host else first)


def options(repl: Replicator, host: int) -> None:
    Replicator(fusion=not host)


def devices(repl: Replicator, host: int) -> None:
    Replicator(repl.devices[: 2 - host])


def dataset(repl: Replicator, host: int) -> None:
    repl.run(lambda x: repl.all_reduce(x), tf.data.Dataset.range(4 + 2 * host))


def strings(repl: Replicator, host: int) -> None:
    repl.run(lambda: repl.broadcast(tf.constant("text"), root=0))


def unknown_rank(repl: Replicator, host: int) -> None:
    @tf.function(input_signature=[tf.TensorSpec(None)])
    def reduced(x: tf.Tensor) -> tf.Tensor:
        return repl.all_reduce(x)

    repl.run(lambda: reduced(tf.ones([2])))


def in_a_graph(repl: Replicator, host: int) -> None:
    with tf.Graph().as_default():
        repl.run(lambda: repl.all_reduce(1.0))


def padded(repl: Replicator, host: int) -> None:
    repl.run(
        lambda x: repl.all_reduce(x),
        lambda ctx: tf.data.Dataset.range(4).batch(2),
        remainder="pad",
    )


def an_object(repl: Replicator, host: int) -> None:
    repl.run(lambda: len(repl.all_gather_object([pathlib.PurePath("/")])))


CASES: dict[str, Callable[[Replicator, int], None]] = {
    function.__name__: function
    for function in (
        *(number_of_calls, shape, reduction, conditional, variable, new_variable),
        *(step_fn_raises, input_fn_raises, one_step_more, another_step, options),
        *(devices, dataset, strings, unknown_rank, in_a_graph, padded, an_object),
    )
}


def mismatches(cluster: Any) -> dict[str, Any]:
    """Returns each case's error, its time, and a correct step's result afterwards."""
    repl = Replicator(cluster.devices)
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        repl.run(lambda: repl.all_reduce(0.0))  # all begin at once
        began = time.monotonic()
        try:
            case(repl, cluster.host_id)
            told = ["nothing", ""]
        except Exception as error:
            told = [type(error).__name__, str(error)]
        seconds = time.monotonic() - began
        try:
            after = float(repl.run(lambda: repl.all_reduce(21.0))[0])
        except Exception as error:
            after = repr(error)
        results[name] = [*told, seconds, after]
    return results


def clash(cluster: Any, kind: str) -> list[Any]:
    """One host runs a step while the other runs another, or builds one.

    Returns:
        The error's class, its message, and the seconds until then.
    """
    repl = Replicator(cluster.devices)
    first = repl.build(lambda: repl.all_reduce(1.0))
    second = repl.build(lambda: repl.all_reduce(tf.ones([3])))
    first()
    if kind == "runs":
        second()
        first()
    began = time.monotonic()
    try:
        (second if cluster.host_id else first)()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return ["nothing"]
