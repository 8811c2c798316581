# SPDX-License-Identifier: Apache-2.0
"""Hosts that are lost, fail or end: the others report which one, in time."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator import Replicator
from tests import sampling
from tests.between import processes
from tests.cluster import servers

_LONG = 600.0  # seconds of idling, until the test ends the host


def _ready() -> None:
    print("READY", flush=True)


@contextlib.contextmanager
def _noted(found: list[Any]) -> Iterator[None]:
    """Notes a lost host in this block, and the time."""
    try:
        yield
        found.append("nothing")
    except replicator.HostLostError as error:
        found.append([time.time(), str(error), list(error.hosts)])


def lost(cluster: Any, moment: str, which: str) -> list[Any]:
    """Returns the errors about a host that the test kills or stops.

    Args:
        cluster: All hosts.
        moment: The others' activity then: run steps, run the first after it was built,
            build one, or make a variable.
        which: The host.
    """
    repl = Replicator(cluster.devices)
    with repl.context():
        v = tf.Variable(tf.zeros([1000]))

    def step_fn() -> tf.Tensor:
        return v.assign_add(repl.all_reduce(tf.ones([1000])))

    repl.run(step_fn)
    new = repl.build(lambda: repl.all_reduce(tf.ones([10]), "max"))
    if moment == "first":
        assert len(new.plan)  # which builds it
    results: list[Any] = []
    _ready()
    if moment != "step" and cluster.host_id == int(which):
        time.sleep(_LONG)
    with _noted(results):
        while moment == "step":
            repl.run(step_fn)
        if moment == "variable":
            with repl.context():
                tf.Variable(1.0)
        new()
    with _noted(results):
        repl.run(step_fn)
    with _noted(results):
        cluster.check()
    cluster.close()
    return results


def ends_by_an_error(cluster: Any) -> list[Any]:
    """Host 1 raises while the others are in a step."""
    repl = Replicator(cluster.devices)
    step_fn = lambda: repl.all_reduce(1.0)  # noqa: E731
    repl.run(step_fn)
    if cluster.host_id == 1:
        raise ValueError("no more memory")
    results: list[Any] = []
    with _noted(results):
        repl.run(step_fn)
    return results


def ends_at_different_times(cluster: Any) -> float:
    """After the last step each host computes by itself, the later ones longer."""
    repl = Replicator(cluster.devices)
    total = repl.run(lambda: repl.all_reduce(1.0))
    time.sleep((0.0, 1.0, 2.5)[cluster.host_id])
    cluster.close()
    return float(total[0])


def a_step_fails(cluster: Any) -> dict[str, Any]:
    """A step fails while it runs: first on both hosts, then on host 1 alone."""
    repl = Replicator(cluster.devices)
    with repl.context():
        v = tf.Variable(1.0)

    def step_fn(limit: tf.Tensor) -> tf.Tensor:
        total = repl.all_reduce(v * 1.0)
        tf.debugging.assert_less(limit, 2.0, message="above two")
        return v.assign_add(repl.all_reduce(total + limit))

    errors: dict[str, Any] = {"right": float(repl.run(step_fn, args=(1.0,))[0])}
    try:
        repl.run(step_fn, args=(3.0,))
    except tf.errors.InvalidArgumentError as error:
        errors["both"] = "above two" in str(error)
    errors["again"] = float(repl.run(step_fn, args=(1.0,))[0])
    began = time.monotonic()
    for attempt in ("alone", "after"):
        try:
            repl.run(step_fn, args=(1.0 + 2 * cluster.host_id,))
        except tf.errors.OpError as error:
            errors[attempt] = [type(error).__name__, str(error)]
    errors["seconds"] = time.monotonic() - began
    errors["v"] = float(v)
    return errors


# --- Tests ----------------------------------------------------------------------------


_HEARTBEAT = 5.0  # as in processes.start
_BUSY = 4.0  # the factor of a busy machine
_NAMES = ["host-0", "host-1", "host-2"]


def _wait_until_ready(started: list[subprocess.Popen]) -> None:
    for process in started:
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and line != "READY\n":
            line = process.stdout.readline()


def _lose(kind: int, moment: str, which: int, count: int) -> list[tuple[float, Any]]:
    """Kills or stops a host; returns when, and each other one's errors."""
    started = processes.start("test_faults.lost", [1] * count, moment, str(which))
    try:
        _wait_until_ready(started)
        time.sleep(1.0)  # the others wait for it by now
        began = time.time()
        started[which].send_signal(kind)
        others = [process for k, process in enumerate(started) if k != which]
        outputs = [process.communicate(timeout=servers.LIMIT) for process in others]
    finally:
        for process in started:
            process.kill()
    for process, (_, text) in zip(others, outputs, strict=True):
        assert process.returncode == 0, text[-6000:]
        assert "Traceback" not in text
    return [(began, json.loads(out.splitlines()[-1])) for out, _ in outputs]


def _check(kind: int, moment: str, which: int, count: int = 2) -> None:
    limit = 1.0 if kind == signal.SIGKILL else _HEARTBEAT
    for began, (first, *later) in _lose(kind, moment, which, count):
        seconds, text, names = first[0] - began, first[1], first[2]
        assert names == [_NAMES[which]], text
        assert seconds < _BUSY * limit, text
        assert text.startswith(f"1 of {count} hosts is lost: {_NAMES[which]}.\n")
        assert f"  {_NAMES[which]}: " in text
        assert "tests/between/test_faults.py:" in text
        assert "Fix: end all processes, and restart them" in text
        for _, text, names in later:  # another step, and cluster.check()
            assert _NAMES[which] in names, text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment", "which"),
    [
        pytest.param(signal.SIGKILL, "first", 1, marks=pytest.mark.gate),
        (signal.SIGSTOP, "build", 0),
    ],
)
def test_a_lost_host_is_named(kind: int, moment: str, which: int) -> None:
    _check(kind, moment, which)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment", "which"),
    sampling.in_turn(
        [signal.SIGKILL, signal.SIGSTOP], ["step", "first", "build", "variable"], [0, 1]
    ),
)
def test_faults(kind: int, moment: str, which: int) -> None:
    _check(kind, moment, which, count=3)


@pytest.mark.slow
def test_a_program_that_ends_by_an_error_frees_the_others() -> None:
    started = processes.start("test_faults.ends_by_an_error", [1, 1])
    try:
        outputs = [process.communicate(timeout=servers.LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 1], outputs[0][1][-4000:]
    assert outputs[1][1].count("Traceback") == 1
    assert "Traceback" not in outputs[0][1]
    ((_, text, names),) = json.loads(outputs[0][0].splitlines()[-1])
    assert names == ["host-1"]
    assert "  host-1: its program ended with ValueError: no more memory\n" in text
    assert "tests/between/test_faults.py:" in text


@pytest.mark.slow
def test_programs_end_at_different_times() -> None:
    started = processes.start("test_faults.ends_at_different_times", [1, 1, 1])
    try:
        outputs = [process.communicate(timeout=servers.LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (out, text) in zip(started, outputs, strict=True):
        assert process.returncode == 0, text[-4000:]
        assert float(out.splitlines()[-1]) == 3.0
        assert "Traceback" not in text
        assert "StartAbort" not in text  # TensorFlow considers nobody lost


@pytest.mark.slow
def test_a_step_that_fails() -> None:
    """On all hosts: they continue. On one: the others get an error, and all stop."""
    first, second = processes.run("test_faults.a_step_fails", [1, 1])
    # The sum of v on two hosts and 1, summed; the step that failed changed nothing.
    right = 1.0 + 2 * (2 * 1.0 + 1.0)
    again = right + 2 * (2 * right + 1.0)
    for results in (first, second):
        assert (results["right"], results["both"]) == (right, True)
        assert (results["again"], results["v"]) == (again, again)
        assert results["seconds"] < 10.0
    assert second["alone"][0] == "InvalidArgumentError"
    assert "above two" in second["alone"][1]
    kind, text = first["alone"]
    assert kind == "HostLostError"
    assert "  host-1: a step failed there: InvalidArgumentError: " in text
    assert "above two" in text
    assert first["after"][0] == second["after"][0] == "HostLostError"
    # Whichever is known first: its own failure, or that the other has ended.
    reasons = ("this host: a step failed there", "host-0: its program has ended")
    assert any(reason in second["after"][1] for reason in reasons)
