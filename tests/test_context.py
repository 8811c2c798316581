# SPDX-License-Identifier: Apache-2.0
"""The replica being built is known inside a step only, and never left behind."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import context
from replicator.options import Options
from replicator.world import World
from tests import helpers


@pytest.mark.parametrize("num_replicas", [1, 4])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_replicas_are_built_in_order_and_know_themselves(
    mode: str, num_replicas: int
) -> None:
    repl = helpers.make(num_replicas)
    seen: list[tuple[int, int, str]] = []

    def step_fn() -> tf.Tensor:
        replica = context.current()
        assert replica is not None and replica.replica_id == repl.replica_id
        seen.append((replica.replica_id, replica.num_replicas, replica.device))
        return tf.constant(repl.replica_id)

    results = helpers.run(mode, repl, lambda: step_fn)
    assert list(results) == list(range(num_replicas))
    assert seen == [(r, num_replicas, d) for r, d in enumerate(repl.devices)]
    assert context.current() is None


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("where", ["eager", "function", "session"])
def test_nothing_is_left_behind_by_an_exception(
    where: str, error: type[BaseException]
) -> None:
    repl = helpers.make(2)

    def fail() -> None:
        if repl.replica_id == 1:
            raise error

    def run(step_fn: Any) -> Any:
        if where == "session":
            with tf.Graph().as_default(), tf.device("CPU:3") as _:
                graph = tf.compat.v1.get_default_graph()
                stack = graph._device_functions_outer_to_inner
                try:
                    return repl.run(step_fn)
                finally:
                    assert graph._device_functions_outer_to_inner == stack
                    assert graph.get_name_scope() == ""
        call = (lambda: repl.run(step_fn)) if where == "eager" else None
        return (call or tf.function(lambda: repl.run(step_fn)))()

    with pytest.raises(error):
        run(fail)
    assert context.current() is None
    assert not isinstance(tf.Variable(1.0), replicator.ReplicatedVariable)
    with pytest.raises(replicator.ContextError, match="replica_id was called outside"):
        repl.replica_id  # noqa: B018
    assert len(run(lambda: repl.all_reduce(1.0))) == 2


def test_steps_inside_steps_are_refused() -> None:
    repl, other = helpers.make(2), helpers.make(2)
    for inner in (repl, other):

        def step_fn(inner: replicator.Replicator = inner) -> Any:
            return inner.run(lambda: tf.constant(1.0))

        with pytest.raises(
            replicator.ContextError,
            match=r"(?s)a step was run inside a step.*test_context.py:\d+ in step_fn"
            r".*Fix: run it outside",
        ):
            repl.run(step_fn)


def test_require_names_what_was_called_and_the_way_out() -> None:
    with pytest.raises(
        replicator.ContextError,
        match=r"my_call was called outside a step.\n .*test_context.py.*\nFix: call",
    ):
        context.require("my_call")


def test_threads_do_not_see_each_others_replica() -> None:
    repl = helpers.make(2, build="trace")
    seen: list[Any] = []

    def step_fn() -> None:
        thread = threading.Thread(target=lambda: seen.append(context.current()))
        thread.start()
        thread.join()

    repl.run(step_fn)
    assert seen == [None, None]


def test_threads_may_build_at_the_same_time() -> None:
    repls = [helpers.make(2, build="trace") for _ in range(3)]
    barrier = threading.Barrier(3)
    results: dict[int, list[float]] = {}

    def work(k: int) -> None:
        def step_fn() -> tf.Tensor:
            barrier.wait(timeout=60)  # now all threads are inside a step
            variable = tf.Variable(float(k))
            return repls[k].all_reduce(variable + repls[k].replica_id)

        results[k] = [float(v) for v in repls[k].run(step_fn)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [2.0 * k + 1.0] * 2 for k in range(3)}


def replica_context() -> context.ReplicaContext:
    build = context.Build(
        World.single_process(["a", "b"]), Options(), None, _NoLedger(), None, {}, {}
    )
    return context.ReplicaContext(build, 1)


class _NoLedger:
    def agreed(self, claim: Any) -> Any:
        return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("block", "flag"), [("equal_updates", "updating"), ("backward_pass", "backward")]
)
def test_blocks_set_their_flag_and_put_it_back(block: str, flag: str) -> None:
    replica = replica_context()
    with pytest.raises(KeyError), getattr(replica, block)():
        assert getattr(replica.mode, flag)
        with getattr(replica, block)():
            pass
        assert getattr(replica.mode, flag)
        raise KeyError
    assert not getattr(replica.mode, flag)


def test_places_are_counted() -> None:
    replica = replica_context()
    assert [replica.count(key) for key in "aabab"] == [0, 1, 0, 2, 1]
    assert replica.device == "b" and replica.num_replicas == 2


def test_building_nests_and_puts_back() -> None:
    replica = replica_context()
    with context.building(replica):
        with context.building(None):
            assert context.current() is None
        assert context.current() is replica
    assert context.current() is None
