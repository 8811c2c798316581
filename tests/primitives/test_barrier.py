# SPDX-License-Identifier: Apache-2.0
"""barrier: ops before it on any replica run before ops after it on any other.

Proved by logs that the replicas write while the step runs, one of them slowly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests import helpers

SLOW = 0.1  # seconds; without a barrier, the others finish long before
GRAPHS = ("function", "session")


class Log:
    """The replicas' events, in order.

    Attributes:
        lines: Of the form "before 2".
    """

    def __init__(self, repl: replicator.Replicator) -> None:
        self.lines: list[str] = []
        self._repl = repl

    def note(self, text: str, slow: int | None = None) -> tf.Operation:
        """Notes `text` when the step runs; slowly on the replica `slow`."""
        replica_id = self._repl.replica_id

        def write() -> None:
            time.sleep(SLOW if replica_id == slow else 0.0)
            self.lines.append(f"{text} {replica_id}")

        return tf.py_function(write, [], [])

    def phases(self, num_replicas: int) -> list[str]:
        """Returns the text of each phase, which all replicas log before the next."""
        count = len(self.lines) // num_replicas
        groups = [
            self.lines[k * num_replicas : (k + 1) * num_replicas] for k in range(count)
        ]
        phases = []
        for group in groups:
            (text,) = {line.rpartition(" ")[0] for line in group}
            assert len(set(group)) == num_replicas, self.lines
            phases.append(text)
        return phases


Program = Callable[[replicator.Replicator, Log], Any]


def _top_level(repl: replicator.Replicator, log: Log) -> None:
    log.note("first", slow=1)
    repl.barrier()
    log.note("second", slow=2)
    repl.barrier()
    repl.barrier()
    log.note("third")


def _in_loop(repl: replicator.Replicator, log: Log) -> None:
    def body(k: tf.Tensor) -> tf.Tensor:
        log.note("early", slow=0)
        repl.barrier()
        log.note("late", slow=2)
        return k + 1

    log.note("before", slow=1)
    tf.while_loop(lambda k: k < 3, body, [tf.constant(0)])
    log.note("after")


def _at_the_end_of_a_loop(repl: replicator.Replicator, log: Log) -> None:
    def body(k: tf.Tensor) -> tf.Tensor:
        log.note("turn", slow=1)
        repl.barrier()
        return k + 1

    tf.while_loop(lambda k: k < helpers.opaque(2), body, [tf.constant(0)])
    log.note("after")


def _in_function(repl: replicator.Replicator, log: Log) -> None:
    @tf.function
    def inner() -> None:
        log.note("early", slow=0)
        repl.barrier()
        log.note("late", slow=2)

    inner()
    inner()
    log.note("after")


def _in_branch(repl: replicator.Replicator, log: Log) -> None:
    """Ops outside of the conditional are held up as well."""
    log.note("before", slow=2)
    tf.cond(helpers.opaque(True), lambda: repl.barrier() or 0, lambda: 1)
    log.note("after")


PROGRAMS: dict[str, tuple[Program, list[str]]] = {
    "top": (_top_level, ["first", "second", "third"]),
    "loop": (_in_loop, ["before", *["early", "late"] * 3, "after"]),
    "end of loop": (_at_the_end_of_a_loop, ["turn", "turn", "after"]),
    "function": (_in_function, [*["early", "late"] * 2, "after"]),
    "branch": (_in_branch, ["before", "after"]),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_nobody_passes_before_all_have_come(name: str, mode: str) -> None:
    program, want = PROGRAMS[name]
    repl = helpers.make(3)
    log = Log(repl)

    def step() -> tf.Tensor:
        program(repl, log)
        return tf.constant(0)

    helpers.run(mode, repl, lambda: step, steps=2)
    assert log.phases(3) == want * 2


@pytest.mark.parametrize("mode", GRAPHS)
def test_without_a_barrier_nobody_waits(mode: str) -> None:
    """Otherwise this file would prove nothing."""
    repl = helpers.make(2)
    log = Log(repl)

    def step() -> tf.Tensor:
        log.note("first", slow=0)
        log.note("second")
        return tf.constant(0)

    helpers.run(mode, repl, lambda: step)
    assert log.lines.index("second 1") < log.lines.index("first 0")


@pytest.mark.parametrize("mode", GRAPHS)
def test_a_group_waits_for_its_members_only(mode: str) -> None:
    repl = helpers.make(4)
    log = Log(repl)
    pairs = repl.groups([[0, 1], [2, 3]])

    def step() -> tf.Tensor:
        log.note("first", slow=0)
        repl.barrier(group=pairs)
        log.note("second")
        return tf.constant(0)

    helpers.run(mode, repl, lambda: step)
    at = log.lines.index
    assert max(at("first 0"), at("first 1")) < min(at("second 0"), at("second 1"))
    assert max(at("second 2"), at("second 3")) < at("first 0")


@pytest.mark.parametrize("mode", helpers.MODES)
def test_what_one_replica_writes_the_others_read_behind_it(mode: str) -> None:
    """In a table that all replicas share; the builder writes after a while."""
    repl = helpers.make(3)

    def slow_value() -> int:
        time.sleep(SLOW)
        return 7

    def make_step() -> Callable[[], Any]:
        table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.int32, -1)

        def step() -> Any:
            before = table.lookup(helpers.opaque(0))
            repl.barrier()
            if repl.replica_id == 1:
                table.insert(0, tf.py_function(slow_value, [], tf.int32))
            repl.barrier()
            return before, table.lookup(helpers.opaque(0))

        return step

    before, after = helpers.run(mode, repl, make_step)
    assert [int(x) for x in before] == [-1] * 3
    assert [int(x) for x in after] == [7] * 3


@pytest.mark.parametrize("mode", helpers.MODES)
def test_variables_on_both_sides_of_it(mode: str) -> None:
    """Those that a step creates are initialised independently of all barriers."""
    repl = helpers.make(2)
    variables: list[tf.Variable] = []

    def step() -> Any:
        repl.barrier()
        if len(variables) < 2:
            variables.append(
                tf.Variable(tf.random.stateless_uniform([2], [1, 2]) * 0.0)
            )
        before = variables[0].read_value()
        repl.barrier()
        variables[0].assign_add([1.0, 2.0])
        repl.barrier()
        return before, variables[0].read_value()

    before, after = helpers.run(mode, repl, lambda: step, steps=2)
    assert [list(x) for x in before] == [[1.0, 2.0]] * 2
    assert [list(x) for x in after] == [[2.0, 4.0]] * 2


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_nothing_comes_of_it(num_replicas: int) -> None:
    repl = helpers.make(num_replicas)

    def step() -> int:
        assert repl.barrier() is None
        return repl.replica_id

    assert [int(r) for r in repl.run(step)] == list(range(num_replicas))


# --- Errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", GRAPHS)
def test_a_message_across_it_is_a_deadlock(mode: str) -> None:
    """Replica 0 waits in the barrier, replica 1 for a message that is sent after it."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = tf.constant(1.0)
        if repl.replica_id == 0:
            repl.barrier()
            repl.send(x, 1)
        else:
            x = repl.recv(x, 0)
            repl.barrier()
        return x

    line = r"at tests.primitives.test_barrier\.py:\d+ in step"
    with pytest.raises(
        errors.DeadlockError,
        match=rf"(?s)replica 0 .*: barrier {line}\s+must happen before send .* {line}"
        rf"\s+replica 1 .*: recv .* {line}\s+must happen before barrier {line}",
    ):
        helpers.run(mode, repl, lambda: step)


@pytest.mark.parametrize("mode", GRAPHS)
def test_an_effect_that_needs_a_gradient_from_across_it_is_a_deadlock(
    mode: str,
) -> None:
    """Replica 1 contributes to the gradient only after the barrier."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x)
        if repl.replica_id == 0:
            d = tape.gradient(y, x)
            tf.print(d)
            repl.barrier()
        else:
            repl.barrier()
            upstream = tf.py_function(lambda: 1.0, [], tf.float32)
            d = tape.gradient(y, x, output_gradients=tf.ensure_shape(upstream, []))
        return d

    with pytest.raises(
        errors.DeadlockError,
        match=r"(?s)replica 0 .*: all_reduce .*in the gradient, at .*before barrier at "
        r".*replica 1 .*: barrier at .*before all_reduce .*in the gradient, at",
    ):
        helpers.run(mode, repl, lambda: step)
