# SPDX-License-Identifier: Apache-2.0
"""Runs programs in several processes that join one another, as the launcher would.

`python -m tests.between.processes NAME ARGUMENT...` is one of them.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import pickle
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replicator
from replicator.cluster import addresses
from tests.between import programs
from tests.cluster import servers
from tests.keras import test_programs, worlds
from tests.programs import catalogue, runner


def start(
    name: str,
    cpus: Sequence[int],
    *arguments: str,
    settings: Sequence[Mapping[str, str]] = (),
) -> list[subprocess.Popen]:
    """Starts a program, a function of a file of this folder, in several processes.

    Args:
        name: FUNCTION of this file, or FILE.FUNCTION.
        cpus: The number of CPU devices of each process.
        *arguments: The program's arguments.
        settings: Environment variables of each process, if any.
    """
    ports = [addresses.free_port() for _ in cpus]
    hosts = [
        {"name": f"host-{k}", "address": f"127.0.0.1:{port}", "cpus": count}
        for k, (port, count) in enumerate(zip(ports, cpus, strict=True))
    ]
    facts = {"version": 1, "source": "a test", "heartbeat": 5.0, "hosts": hosts}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.between.processes", name, *arguments],
            cwd=servers.ROOT,
            env=servers.environment(
                REPLICATOR_CLUSTER=json.dumps({**facts, "task": task}),
                **(settings[task] if settings else {}),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in range(len(cpus))
    ]


def run(
    name: str,
    cpus: Sequence[int],
    *arguments: str,
    limit: float = servers.LIMIT,
    settings: Sequence[Mapping[str, str]] = (),
) -> list[Any]:
    """Runs a program in all processes; returns the result of each.

    Args:
        name: The program's name.
        cpus: The number of CPU devices of each process.
        *arguments: The program's arguments.
        limit: The maximum time, in seconds.
        settings: Environment variables of each process, if any.
    """
    started = start(name, cpus, *arguments, settings=settings)
    try:
        outputs = [process.communicate(timeout=limit) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors[-6000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


# --- The programs ---------------------------------------------------------------------


def all_runs(cluster: Any, folder: str) -> None:
    """Writes the results of all runs of programs.py into a folder."""
    results = {
        name: _plain(run(replicator.Replicator(cluster.devices)))
        for name, run in programs.RUNS.items()
    }
    pathlib.Path(folder, str(cluster.host_id)).write_bytes(pickle.dumps(results))


def of_catalogue(cluster: Any, folder: str, *names: str) -> None:
    """Writes the results and components of programs of the catalogue."""
    chosen = [catalogue.PROGRAMS[name] for name in names]
    outcomes = {
        program.name: runner.outcome(
            program.first or program, "eager", replicator.Replicator(cluster.devices)
        )
        for program in chosen
    }
    pathlib.Path(folder, str(cluster.host_id)).write_bytes(pickle.dumps(outcomes))


def _plain(value: Any) -> Any:
    """Returns a nest with arrays in place of tensors; PerReplicas stay."""
    if isinstance(value, replicator.PerReplica):
        return replicator.PerReplica(*[_plain(entry) for entry in value])
    if isinstance(value, dict):
        return {key: _plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.numpy() if tf.is_tensor(value) else np.asarray(value)


def several(cluster: Any, *names: str) -> dict[str, Any]:
    """Runs programs one after the other; returns each one's result."""
    return {name: _program(name)(cluster) for name in names}


def fits(cluster: Any, folder: str, *names: str) -> None:
    """Writes the results of programs with Keras' fit into a folder."""
    results = {}
    for name in names:
        keras.backend.clear_session()
        world = worlds.World(replicator.Replicator(cluster.devices))
        results[name] = _plain(getattr(test_programs, name)(world))
    pathlib.Path(folder, str(cluster.host_id)).write_bytes(pickle.dumps(results))


def resumed(cluster: Any, folder: str, until: str, with_inputs: str) -> Any:
    """Trains until a step, from the newest checkpoint on; each host has a folder."""
    repl = replicator.Replicator(cluster.devices)
    with repl.context():
        v = tf.Variable([1.0, 2.0, 3.0])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.1))
        seen = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        host_folder = tf.data.Dataset.range(100).shard(
            ctx.num_pipelines, ctx.pipeline_id
        )
        return host_folder.shuffle(100, seed=ctx.pipeline_id).map(
            lambda n: tf.cast(n, tf.float32) / 50.0
        )

    def step_fn(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((v - x) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])
        seen.assign_add(1.0)
        return repl.all_reduce(loss, "mean")

    host_folder = pathlib.Path(folder, f"host-{cluster.host_id}")
    objects: dict[str, Any] = {"v": v, "optimizer": optimizer, "seen": seen}
    if with_inputs == "inputs":
        objects["inputs"] = repl.inputs
    checkpoint = cluster.checkpoint(host_folder, **objects)
    begun = checkpoint.step
    losses = [
        float(repl.run(step_fn, input_fn))
        for _ in checkpoint.steps(int(until), every=2)
    ]
    there = sorted(path.name for path in host_folder.glob("*.index"))
    return [begun, losses, v.numpy().tolist(), float(seen), there]


def trains_by_factors(cluster: Any) -> list[Any]:
    """Returns whether products were computed from factors, and the bits of weights."""
    repl = replicator.Replicator(cluster.devices)
    with repl.context():
        w = tf.Variable(tf.zeros([1600, 1600]))
        optimizer = repl.wrap_optimizer(keras.optimizers.Adam(0.01))
    x = tf.random.stateless_normal([384, 1600], seed=[1, cluster.host_id])

    def step_fn() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w - 0.1) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])

    for _ in range(5):
        repl.run(step_fn)
    by_factors = any("factors" in row.algorithm for row in repl.plan)
    return [by_factors, zlib.crc32(w.components[0].numpy().tobytes())]


def _program(name: str) -> Any:
    """Returns a function of this file, or of another one of this folder."""
    module, _, function = name.rpartition(".")
    if not module:
        return globals()[function]
    return getattr(importlib.import_module(f"tests.between.{module}"), function)


def main(name: str, *arguments: str) -> None:
    """Joins the others, and prints a program's result, as JSON."""
    cluster = replicator.connect(timeout=300)
    print(json.dumps(_program(name)(cluster, *arguments)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
