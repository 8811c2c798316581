# SPDX-License-Identifier: Apache-2.0
"""Programs that would make replicas drift apart, or deadlock, fail on all hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import replicator
from replicator import Replicator


def proofs(cluster: Any) -> dict[str, list[str]]:
    """Returns each program's kind of error, if any, and its message."""
    repl = replicator.Replicator(cluster.devices)
    with repl.context():
        v, count = tf.Variable([1.0, 2.0]), tf.Variable(0)
        wrapped = repl.wrap_optimizer(keras.optimizers.SGD(0.1))
        plain = keras.optimizers.SGD(0.1)
    host = cluster.host_id
    results = {}

    def tried(name: str, run: Callable[[], Any]) -> None:
        try:
            run()
            results[name] = ["", ""]
        except (replicator.ReplicatorError, tf.errors.OpError) as error:
            results[name] = [type(error).__name__, str(error)]

    def update(gradient: Any) -> None:
        plain.apply_gradients([(gradient, v)])

    def wrapped_update() -> None:
        wrapped.apply_gradients([(tf.constant([1.0, 2.0]) * repl.replica_id, v)])

    dataset = tf.data.Dataset.from_tensors([1.0, 2.0]).repeat()
    mine = replicator.PerReplica(tf.constant([1.0, float(host)]))
    tried("wrapped", lambda: repl.run(wrapped_update))
    tried("own data", lambda: repl.run(update, lambda ctx: dataset))
    tried("own argument", lambda: repl.run(update, args=(mine,)))
    tried("argument", lambda: repl.run(update, args=(tf.constant([1.0, 2.0]),)))
    tried("constant", lambda: repl.run(lambda: update(tf.fill([2], host + 1.0))))
    tried(
        "reduced",
        lambda: repl.run(lambda: update(repl.all_reduce(tf.fill([2], host + 1.0)))),
    )
    tried("count", lambda: repl.run(lambda: [count.assign_add(host + 1)]))
    for write in (count.assign_add, lambda n: _add_unseen(v, n)):
        name = "count" if write == count.assign_add else "unseen write"
        tried(f"{name}, by a group", lambda w=write: repl.run(lambda: _chosen(repl, w)))
    v.assign([5.0, 6.0 + host])
    tried("written outside", lambda: repl.run(lambda: v * 2.0))
    v.assign([5.0, 6.0])
    tried("equal again", lambda: repl.run(lambda: v * 3.0))
    _elements(repl, host, tried)
    _orders(repl, tried)
    return results


def _elements(
    repl: Replicator, host: int, tried: Callable[[str, Callable[[], Any]], None]
) -> None:
    """Data sets and values that are to be the same on all hosts."""

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        return repl.all_reduce(x)

    def generated(last: int) -> tf.data.Dataset:
        numbers = [1.0, 2.0, 3.0, 4.0, 5.0, last]
        return tf.data.Dataset.from_generator(
            lambda: iter(numbers), output_signature=tf.TensorSpec([])
        )

    def third_step(dataset: tf.data.Dataset) -> None:
        step = repl.build(step_fn, dataset)
        for _ in range(2):
            reads.append(step())
        step()

    reads: list[Any] = []
    for name, last in (("same elements", 6.0), ("other elements", 6.0 + host)):
        for suffix, count in (("", 1), (", repeated", None)):
            dataset = generated(last).repeat(count)
            tried(name + suffix, lambda dataset=dataset: third_step(dataset))
    assert len(reads) == 8, "only the third steps differ"
    arrays = tf.data.Dataset.from_tensor_slices(tf.range(40) + host)
    tried("other arrays", lambda: repl.run(step_fn, arrays))
    tried("other argument", lambda: repl.run(step_fn, args=(0.5 + host,)))
    own = replicator.PerReplica(tf.constant(0.5 + host))
    tried("argument of each", lambda: repl.run(step_fn, args=(own,)))


def _add_unseen(variable: tf.Variable, number: int) -> None:
    """Adds a number by a raw op, which no method of the variable sees."""
    value = tf.fill(variable.shape, tf.cast(number, variable.dtype))
    tf.raw_ops.AssignAddVariableOp(resource=variable.handle, value=value)


def _chosen(repl: Replicator, write: Callable[[int], Any]) -> tf.Tensor:
    """Writes on one host only, by a choice that its own group makes."""
    group = repl.groups([[0], [1]])

    def writes() -> tf.Tensor:
        write(1)
        return repl.all_reduce(1.0, group=group)

    total = repl.all_reduce(float(repl.replica_id), group=group)
    return tf.cond(total > 0.5, writes, lambda: repl.all_reduce(2.0, group=group))


def _orders(repl: Replicator, tried: Callable[[str, Callable[[], Any]], None]) -> None:
    """Replicas that would wait for one another, each followed by a correct step."""
    one, scalar = tf.constant(1.0), tf.TensorSpec([])

    def circle() -> Any:
        other = 1 - repl.replica_id
        received = repl.recv(scalar, source=other)
        repl.send(received + 1.0, destination=other)
        return received

    def crossed() -> Any:
        if repl.replica_id == 0:
            total = repl.all_reduce(one)
            repl.send(total, destination=1)
            return total
        return repl.all_reduce(repl.recv(scalar, source=0))

    def places() -> Any:
        if repl.replica_id == 0:
            return repl.all_reduce(one)
        return tf.cond(one > 0, lambda: repl.all_reduce(one), lambda: one)

    def disagree() -> Any:
        mine = tf.constant(repl.replica_id) > 0
        return tf.cond(mine, lambda: repl.all_reduce(one), lambda: one)

    inner = tf.function(circle)

    def conditional_circle() -> Any:
        return tf.cond(repl.all_reduce(one) > 0, circle, lambda: one)

    def loop_circle() -> Any:
        return tf.while_loop(
            lambda k, _: k < 2, lambda k, _: (k + 1, circle()), (0, one)
        )

    def function_circle() -> Any:
        return inner()

    inside = (function_circle, conditional_circle, loop_circle)
    for step_fn in (circle, *inside, crossed, places, disagree):
        tried(step_fn.__name__, lambda step_fn=step_fn: repl.run(step_fn))
    tried("right", lambda: repl.run(lambda: repl.all_reduce(one)))


# --- Tests ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(told: list[dict[str, Any]]) -> list[dict[str, list[str]]]:
    return [results["test_proven.proofs"] for results in told]


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("wrapped", "", ()),
        ("own data", "ContextError", ("not equal on all", "IteratorGetNext")),
        ("own argument", "ContextError", ("not equal on all replicas", "proven.py")),
        ("argument", "", ()),
        ("constant", "MismatchError", ("writes variables", "host 0 (", "host 1 (")),
        ("reduced", "", ()),
        ("count", "MismatchError", ("writes variables", "proven.py")),
        (
            "count, by a group",
            "InvalidArgumentError",
            ("replicas disagree in a conditional", "assign_add"),
        ),
        ("unseen write, by a group", "ContextError", ("drift apart", "proven.py")),
        ("written outside", "MismatchError", ("holds variables", "host 1 (")),
        ("equal again", "", ()),
        ("same elements", "", ()),
        ("same elements, repeated", "", ()),
        (
            "other elements",
            "InvalidArgumentError",
            ("read different elements", "proven.py", "host 0 read", "host 1 read"),
        ),
        ("other elements, repeated", "InvalidArgumentError", ("proven.py", "Fix: let")),
        ("other arrays", "MismatchError", ("reads a dataset", "int32[40] with")),
        (
            "other argument",
            "MismatchError",
            ("float32[] 1.5", "proven.py", "PerReplic"),
        ),
        ("argument of each", "", ()),
        ("circle", "DeadlockError", ("in a cycle", "replica 0", "replica 1")),
        ("function_circle", "DeadlockError", ("in a cycle", "replica 0", "replica 1")),
        ("conditional_circle", "DeadlockError", ("in a cycle", "proven.py")),
        ("loop_circle", "DeadlockError", ("in a cycle", "proven.py")),
        ("crossed", "DeadlockError", ("in a cycle", "send source=0", "all_reduce")),
        ("places", "MismatchError", ("at the top level", "inside a conditional")),
        (
            "disagree",
            "InvalidArgumentError",
            ("replicas disagree in a conditional", "replica 1 takes the true branch"),
        ),
        ("right", "", ()),
    ],
)
def test_all_hosts_say_the_same(found, name, kind, parts):
    for own in found:
        assert own[name][0] == kind, own[name]
        for part in parts:
            assert part in own[name][1], own[name]
    fixed = kind in ("", "InvalidArgumentError") or "Fix: " in found[0][name][1]
    assert fixed
