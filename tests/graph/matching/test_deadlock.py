# SPDX-License-Identifier: Apache-2.0
"""Circular waits are found while the step is built, and shown link by link."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests import helpers

SCALAR = tf.TensorSpec([])
Program = Callable[[replicator.Replicator], Any]


def _x(repl: replicator.Replicator) -> tf.Tensor:
    return helpers.opaque(1.0 + repl.replica_id)


# --- Programs that cannot run ---------------------------------------------------------


def _all_receive_first(repl: replicator.Replicator) -> tf.Tensor:
    size = repl.num_replicas
    y = repl.recv(SCALAR, (repl.replica_id - 1) % size)
    repl.send(_x(repl), (repl.replica_id + 1) % size)
    return y


def _groups_in_a_circle(repl: replicator.Replicator) -> tf.Tensor:
    """Each pair of neighbours is first for one and second for the other."""
    r, size = repl.replica_id, repl.num_replicas
    for first in (r, (r - 1) % size):
        group = repl.group([first, (first + 1) % size])
        repl.all_reduce(_x(repl), group=group)
    return _x(repl)


def _collective_against_message(repl: replicator.Replicator) -> tf.Tensor:
    if repl.replica_id == 0:
        repl.all_reduce(_x(repl))
        repl.send(_x(repl), 1)
    elif repl.replica_id == 1:
        repl.recv(SCALAR, 0)
        repl.all_reduce(_x(repl))
    else:
        repl.all_reduce(_x(repl))
    return _x(repl)


def _loops_in_other_orders(repl: replicator.Replicator) -> tf.Tensor:
    pair, everyone = repl.group([0, 1]), repl.group(range(repl.num_replicas))
    order = [pair, everyone] if repl.replica_id == 0 else [everyone, pair]
    for group in order if repl.replica_id < 2 else [everyone]:
        tf.while_loop(
            lambda k: k < 2.0,
            lambda k, group=group: k + repl.all_reduce(_x(repl), "mean", group=group),
            [tf.constant(0.0)],
        )
    return _x(repl)


def _circle_inside_a_loop(repl: replicator.Replicator) -> tf.Tensor:
    def body(k: tf.Tensor, y: tf.Tensor) -> Any:
        return k + 1, y + _all_receive_first(repl)

    return tf.while_loop(lambda k, _: k < 3, body, (0, _x(repl)))[1]


def _gradients_crosswise(repl: replicator.Replicator) -> tf.Tensor:
    """Each of two gradients is computed from the other one, on one of two replicas."""
    x, y = _x(repl), _x(repl)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, y])
        a, b = repl.all_reduce(x), repl.all_reduce(y)
    if repl.replica_id == 0:
        d = tape.gradient(a, x)
        return tape.gradient(b, y, output_gradients=d)
    d = tape.gradient(b, y)
    return tape.gradient(a, x, output_gradients=d)


# The number of replicas, and each link: the replica, the call that it waits in, and
# the call after that.
CIRCLES: dict[str, tuple[Program, int, list[tuple[int, str, str]]]] = {
    "two receive first": (
        _all_receive_first,
        2,
        [
            (0, "recv source=1 destination=0", "send source=0 destination=1"),
            (1, "recv source=0 destination=1", "send source=1 destination=0"),
        ],
    ),
    "four receive first": (
        _all_receive_first,
        4,
        [
            (
                r,
                f"recv source={(r - 1) % 4} destination={r}",
                f"send source={r} destination={(r + 1) % 4}",
            )
            for r in range(4)
        ],
    ),
    "groups": (
        _groups_in_a_circle,
        3,
        [
            (0, r"all_reduce op=sum group=\[0, 1\]", r".*group=\[0, 2\]"),
            (2, r"all_reduce op=sum group=\[0, 2\]", r".*group=\[1, 2\]"),
            (1, r"all_reduce op=sum group=\[1, 2\]", r".*group=\[0, 1\]"),
        ],
    ),
    "collective against message": (
        _collective_against_message,
        3,
        [
            (0, "all_reduce", "send source=0 destination=1"),
            (1, "recv source=0 destination=1", "all_reduce"),
        ],
    ),
    "loops": (
        _loops_in_other_orders,
        3,
        [
            (0, r"a loop .* all_reduce .*group=\[0, 1\]", r"a loop .* all_reduce"),
            (1, r"a loop .* all_reduce", r"a loop .* all_reduce .*group=\[0, 1\]"),
        ],
    ),
    "inside a loop": (
        _circle_inside_a_loop,
        2,
        [
            (0, "recv source=1 destination=0", "send source=0 destination=1"),
            (1, "recv source=0 destination=1", "send source=1 destination=0"),
        ],
    ),
    "gradients": (
        _gradients_crosswise,
        2,
        [
            (0, "all_reduce .*in the gradient", "all_reduce .*in the gradient"),
            (1, "all_reduce .*in the gradient", "all_reduce .*in the gradient"),
        ],
    ),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", CIRCLES)
def test_a_circle_is_shown_link_by_link(name: str, mode: str) -> None:
    program, num_replicas, links = CIRCLES[name]
    repl = helpers.make(num_replicas)
    with pytest.raises(errors.DeadlockError) as caught:
        helpers.run(mode, repl, lambda: lambda: program(repl))
    message = str(caught.value)
    at = r"at tests.graph.matching.test_deadlock\.py:\d+ in \S+"
    shown = r"\s+".join(
        rf"replica {r} \(\S*CPU:{r}\): {before}[^\n]* {at}\s+"
        rf"must happen before {after}[^\n]* {at}"
        for r, before, after in links
    )
    assert re.search(rf"in a cycle:\s+{shown}\s+Fix: .*change the order", message), (
        message
    )
    assert message.count("must happen before") == len(links)


def test_the_lines_are_those_of_the_calls() -> None:
    repl = helpers.make(2)
    with pytest.raises(errors.DeadlockError) as caught:
        repl.run(lambda: _all_receive_first(repl))
    first = _all_receive_first.__code__.co_firstlineno
    lines = re.findall(r"test_deadlock\.py:(\d+)", str(caught.value))
    assert [int(line) - first for line in lines] == [2, 3, 2, 3]


# --- Programs that can ----------------------------------------------------------------


def _all_send_first(repl: replicator.Replicator) -> tf.Tensor:
    size = repl.num_replicas
    repl.send(_x(repl), (repl.replica_id + 1) % size)
    return repl.recv(SCALAR, (repl.replica_id - 1) % size)


def _received_in_another_order_than_sent(repl: replicator.Replicator) -> tf.Tensor:
    """A send waits for nobody: not even for the recv of earlier messages."""
    x = _x(repl)
    if repl.replica_id == 0:
        repl.send(x, 1, tag=1)
        x = repl.linked(x)
        repl.send(x, 1, tag=2)
        return x
    second = repl.recv(SCALAR, 0, tag=2)
    return second + repl.recv(SCALAR, 0, tag=1)


def _sent_before_a_collective(repl: replicator.Replicator) -> tf.Tensor:
    x = _x(repl)
    if repl.replica_id == 0:
        repl.send(x, 1)
        return repl.all_reduce(x)
    total = repl.all_reduce(x)
    return total + repl.recv(SCALAR, 0) * 0.0


def _loops_of_sends(repl: replicator.Replicator) -> tf.Tensor:
    x = _x(repl)

    def send(k: tf.Tensor) -> tf.Tensor:
        repl.send(x, 1)
        return k + 1

    def recv(k: tf.Tensor, y: tf.Tensor) -> Any:
        return k + 1, y + repl.recv(SCALAR, 0)

    if repl.replica_id == 0:
        tf.while_loop(lambda k: k < 3, send, [tf.constant(0)])
        return repl.all_reduce(x)
    total = repl.all_reduce(x)
    return tf.while_loop(lambda k, _: k < 3, recv, (0, total))[1] - total + 2.0 - 2.0


def _groups_apart(repl: replicator.Replicator) -> tf.Tensor:
    """Groups without a common member may communicate in any order."""
    x = _x(repl)
    for _ in range(1 + repl.replica_id // 2):
        x = repl.all_reduce(x, group=repl.groups([[0, 1], [2, 3]]))
    return x


def _gradients_in_other_orders(repl: replicator.Replicator) -> tf.Tensor:
    x = _x(repl)
    with tf.GradientTape() as tape:
        tape.watch(x)
        a, b = repl.all_reduce(x), repl.all_reduce(x * 2.0)
        loss = a + b if repl.replica_id == 0 else b + a
    return tape.gradient(loss, x)


FREE: dict[str, tuple[Program, list[float]]] = {
    "all send first": (_all_send_first, [4.0, 1.0, 2.0, 3.0]),
    "other order": (_received_in_another_order_than_sent, [1.0, 2.0]),
    "sent before": (_sent_before_a_collective, [3.0, 3.0]),
    "loops of sends": (_loops_of_sends, [3.0, 3.0]),
    "groups apart": (_groups_apart, [3.0, 3.0, 14.0, 14.0]),
    "gradients": (_gradients_in_other_orders, [6.0, 6.0]),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", FREE)
def test_what_can_run_runs(name: str, mode: str) -> None:
    program, want = FREE[name]
    repl = helpers.make(len(want))
    results = helpers.run(mode, repl, lambda: lambda: program(repl))
    assert [float(y) for y in results] == want


# --- Critical sections ----------------------------------------------------------------


def test_communication_in_a_critical_section_is_refused() -> None:
    repl, section = helpers.make(2), tf.CriticalSection()

    def step() -> tf.Tensor:
        return section.execute(lambda: repl.all_reduce(tf.constant(1.0)))

    with pytest.raises(
        errors.DeadlockError, match=r"(?s)CriticalSection.*test_deadlock.py:\d+ in"
    ):
        repl.run(step)


def test_communication_around_critical_sections_runs() -> None:
    repl, section = helpers.make(2), tf.CriticalSection()

    def step() -> tf.Tensor:
        total = repl.all_reduce(1.0)
        return repl.all_reduce(section.execute(lambda: total + 1.0))

    assert [float(x) for x in repl.run(step)] == [6.0, 6.0]


def test_a_group_of_one_may_communicate_in_a_critical_section() -> None:
    repl, section = helpers.make(2), tf.CriticalSection()

    def step() -> tf.Tensor:
        group = repl.group([repl.replica_id])
        one = tf.constant(1.0)
        return section.execute(lambda: repl.all_reduce(one, group=group))

    assert [float(x) for x in repl.run(step)] == [1.0, 1.0]
