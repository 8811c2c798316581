# SPDX-License-Identifier: Apache-2.0
"""Programs of several hosts, one of which is lost, fails or ends before the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import replicator
from replicator import Replicator

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
