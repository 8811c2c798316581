# SPDX-License-Identifier: Apache-2.0
"""Runs programs in several processes that share their variables on servers.

`python -m tests.hosts.asynchronous.processes NAME ARGUMENT...` is one of them.
"""

from __future__ import annotations

import doctest
import json
import pathlib
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator import strategy
from replicator.hosts.asynchronous import events
from tests.cluster import servers

HEARTBEAT = 2.0


def start(
    told: Sequence[dict[str, Any]],
    name: str,
    cpus: Sequence[int],
    *arguments: str,
    log: pathlib.Path | None = None,
    only: int | None = None,
) -> list[subprocess.Popen[str]]:
    """Starts programs.

    Args:
        told: The servers' descriptions of themselves.
        name: The program's name.
        cpus: The number of CPU devices of each process.
        *arguments: The arguments of all.
        log: The folder of their events.
        only: The only one to start; None: all.
    """
    facts = {
        "version": 1,
        "source": "a test",
        "heartbeat": HEARTBEAT,
        "hosts": [{"name": f"server-{k}", **t} for k, t in enumerate(told)],
        "programs": [{"name": f"host-{k}", "cpus": n} for k, n in enumerate(cpus)],
    }
    more = {} if log is None else {events.FOLDER: str(log)}
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.hosts.asynchronous.processes",
                name,
                *arguments,
            ],
            cwd=servers.ROOT,
            env=servers.environment(
                REPLICATOR_CLUSTER=json.dumps({**facts, "task": task}), **more
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in (range(len(cpus)) if only is None else [only])
    ]


def addresses(told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the addresses in servers' descriptions."""
    return [{"address": facts["address"], "cpus": 1} for facts in told]


def ended(started: Sequence[subprocess.Popen[str]]) -> list[Any]:
    """Returns the programs' results, once all have ended successfully."""
    try:
        outputs = [process.communicate(timeout=servers.LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors[-6000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def run(
    name: str,
    cpus: Sequence[int],
    *arguments: str,
    count: int = 1,
    log: pathlib.Path | None = None,
) -> list[Any]:
    """Runs a program in all processes; returns the result of each."""
    with servers.serving(count) as server_facts:
        return ended(start(addresses(server_facts), name, cpus, *arguments, log=log))


def log_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the events of all programs, in order of time."""
    lines = [
        json.loads(line)
        for path in folder.glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted(lines, key=lambda line: line["time"])


# --- The programs ---------------------------------------------------------------------


def _say(*words: Any) -> None:
    print(*words, flush=True)


def _meet() -> None:
    """Waits for the test's signal to continue."""
    _say("here")
    sys.stdin.readline()


def counts(cluster: Any, steps: str) -> Any:
    """Adds constants: in the end, every program's addends are there, once."""
    repl = replicator.Replicator()
    with repl.context():
        v = tf.Variable([0.0, 0.0])
        n = tf.Variable(0, dtype=tf.int64)
        scale = tf.Variable(1.0)  # a scalar without a gradient
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.25))

    def step_fn() -> tf.Tensor:
        share = tf.cast(repl.replica_id, tf.float32) + 1.0
        optimizer.apply_gradients([(share * tf.ones([2]) * scale, v)])
        n.assign(n + 2)
        return repl.all_reduce(share, "mean")

    for _ in range(int(steps) * (cluster.host_id + 1)):
        mean = repl.run(step_fn)[0]
    _meet()
    return {
        "v": v.numpy().tolist(),
        "n": int(n),
        "iterations": int(optimizer.iterations),
        "mean": float(mean),
        "devices": len(cluster.devices),
        "host": [cluster.host_id, cluster.num_hosts, list(cluster.hosts)],
        "on": [v.components[0].device, n.components[0].device],
    }


def ahead(cluster: Any, staleness: str, steps: str, pause: str) -> Any:
    """Trains, the last program slowly."""
    repl = replicator.Replicator(strategy=strategy.PS(staleness=int(staleness)))
    with repl.context():
        v = tf.Variable([0.0])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))

    def step_fn() -> None:
        optimizer.apply_gradients([(tf.ones([1]), v)])

    is_slow = cluster.host_id == cluster.num_hosts - 1
    for _ in range(int(steps)):
        if is_slow:
            time.sleep(float(pause))
        repl.run(step_fn)
    return None


def lives(cluster: Any, staleness: str) -> Any:
    """Trains until the test ends it, or an error does."""
    repl = replicator.Replicator(strategy=strategy.PS(staleness=int(staleness)))
    with repl.context():
        v = tf.Variable([0.0])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))

    def step_fn() -> None:
        optimizer.apply_gradients([(tf.ones([1]), v)])

    repl.run(step_fn)
    _say("running")
    end = time.monotonic() + 60.0
    try:
        with cluster.named():
            while time.monotonic() < end and float(v[0]) > -400.0:
                repl.run(step_fn)
                time.sleep(0.01)
    except replicator.ClusterError as error:
        return {"error": str(error), "hosts": list(error.hosts)}
    return {"v": float(v[0])}


def inputs(cluster: Any) -> Any:
    """Reads a dataset, an input_fn with a context, and batches that are split."""
    repl = replicator.Replicator()
    data = tf.data.Dataset.range(12)
    rounds = range(12 // 2 // cluster.num_hosts)

    def same(x: Any) -> Any:
        return x

    dealt = [repl.run(same, data) for _ in rounds]

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        assert (ctx.host_id, ctx.num_hosts) == (cluster.host_id, cluster.num_hosts)
        return data.shard(ctx.num_pipelines, ctx.pipeline_id)

    elements = [repl.run(same, input_fn) for _ in rounds]
    batches = data.batch(2)
    split = [repl.run(same, batches, input_mode="global_batch") for _ in rounds]
    return [
        [int(tf.reshape(x, [])) for row in rows for x in row]
        for rows in (dealt, elements, split)
    ]


def resumes(cluster: Any, folder: str, until: str) -> Any:
    """Trains to a step, from the newest checkpoint on."""
    repl = replicator.Replicator()
    with repl.context():
        v = tf.Variable([0.0])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0, momentum=0.5))

    def step_fn() -> None:
        optimizer.apply_gradients([(tf.ones([1]), v)])

    host_folder = str(pathlib.Path(folder, str(cluster.host_id)))
    checkpoint = cluster.checkpoint(host_folder, v=v, optimizer=optimizer)
    begun = checkpoint.step
    _meet()
    for _ in checkpoint.steps(int(until), every=3):
        repl.run(step_fn)
    _meet()
    if cluster.host_id == 0:
        checkpoint.save()
    return {"begun": begun, "v": float(v[0]), "iterations": int(optimizer.iterations)}


def others(cluster: Any, what: str) -> Any:
    """Creates another variable than the first program does, or runs a wrong step."""
    try:
        repl = replicator.Replicator(strategy=strategy.PS(staleness=2))
        with repl.context():
            if what == "shape":
                tf.Variable(np.zeros([2 + cluster.host_id]))
            elif what == "none" and cluster.host_id:
                tf.Variable(1.0)
            v = tf.Variable([1.0], name="v")
        step = tf.function(lambda: repl.run(lambda: v.assign_add([1.0])))
        if what == "function":
            step()
    except replicator.ReplicatorError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def example(cluster: Any) -> Any:
    """Runs the example of AsynchronousCluster; returns its wrong outputs."""
    from tests import test_docstrings

    wrong: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for found in test_docstrings.EXAMPLES:
        if test_docstrings.needs_programs(found):
            here = types.SimpleNamespace(**vars(replicator))
            here.connect = lambda: cluster  # a program connects once
            found.globs = {"replicator": here, "tf": tf}
            runner.run(found, out=wrong.append)
    return [runner.summarize(verbose=False).attempted, *wrong]


def main(name: str, *arguments: str) -> None:
    """Runs one of the programs."""
    cluster = replicator.connect(timeout=servers.LIMIT / 2)
    result = globals()[name](cluster, *arguments)
    _say(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
