# SPDX-License-Identifier: Apache-2.0
"""Keras' fit over two hosts, in separate processes; see programs.py.

`python -m tests.cluster.fits NAME ADDRESS...` prints a function's result, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replicator
from tests.cluster import servers
from tests.keras import test_programs, worlds

_PROGRAMS = (
    test_programs.image_classification,
    test_programs.sequence_to_sequence,
)
_EPOCHS, _BATCHES = 5, 6
_KILLED_IN = 2  # an epoch
callbacks = keras.callbacks


def equal(addresses: Sequence[str]) -> dict[str, Any]:
    """Programs of tests/keras, on one device and on both hosts.

    Returns:
        By program: the differences from one device with one and with two replicas on
        each host, the number of mirrored variables, and how many of them differ bitwise
        between replicas.
    """
    cluster = replicator.connect(addresses)
    both = [d for d in cluster.devices if d.endswith(":0")], cluster.devices
    results = {}
    for program in _PROGRAMS:
        plain = _results(program, None)
        repls = [replicator.Replicator(names, variables="mirrored") for names in both]
        results[program.__name__] = [_compared(program, plain, repl) for repl in repls]
    return results


def _results(program: worlds.Program, repl: Any) -> list[Any]:
    keras.backend.clear_session()
    return [np.asarray(leaf) for leaf in tf.nest.flatten(program(_World(repl)))]


class _World(worlds.World):
    """A world that remembers its model."""

    def made(self, make: Callable[[], keras.Model]) -> Any:
        self.model = super().made(make)
        return self.model


def _compared(program: worlds.Program, plain: Any, repl: Any) -> dict[str, Any]:
    world = _World(repl)
    keras.backend.clear_session()
    leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(program(world))]
    assert len(leaves) == len(plain)
    errors = [
        np.max(np.abs(a - b) / (1 + np.abs(b)))
        for a, b in zip(leaves, plain, strict=True)
    ]
    model = world.model  # whose metrics count what each replica sees
    kept = [*model.weights, *model.optimizer.variables]
    variables = [v.value for v in kept]
    components = [[c.numpy() for c in v.components] for v in variables]
    return {
        "error": float(np.max(errors)),
        "replicas": [len(values) for values in components],
        "differ": sum(
            value.tobytes() != values[0].tobytes()
            for values in components
            for value in values
        ),
    }


# --- Faults ---------------------------------------------------------------------------


class _Server:
    """A server that listens at the same address after a restart."""

    def __init__(self) -> None:
        self._start()

    def _start(self, *flags: str) -> None:
        self.process = servers.start("--cpus=1", "--watch=stdin", *flags)
        self.address = servers.facts(self.process)["address"]

    def again(self) -> None:
        """Starts it again."""
        self.process.wait(60)
        self._start(f"--port={self.address.rpartition(':')[2]}")


def resumed(addresses: Sequence[str]) -> dict[str, Any]:
    """A fit during which servers are killed and restarted, beside one without."""
    del addresses
    hosts = [_Server(), _Server()]
    with tempfile.TemporaryDirectory() as folder:
        plain = replicator.resilient(_fit_in(folder, {}), _addresses(hosts))
    killed = [(0, "batch"), (1, "batch"), (1, "save"), (0, "save")]
    return {
        "plain": plain,
        "faults": [[*one, _fault(hosts, *one)] for one in killed],
    }


def _addresses(hosts: Sequence[_Server]) -> list[str]:
    return [server.address for server in hosts]


def _fault(hosts: Sequence[_Server], which: int, moment: str) -> dict[str, Any]:
    """Trains while a server is killed once; returns what is lost, and the losses."""
    begun: list[int] = []
    named: list[str] = []
    errors: list[str] = []

    def kill() -> None:
        if not begun:
            begun.append(1)
            limit = 0.02 if moment == "batch" else 0.1
            threading.Timer(random.uniform(0, limit), hosts[which].process.kill).start()

    with tempfile.TemporaryDirectory() as folder:
        fit = _fit_in(folder, {moment: kill})

        def train(cluster: replicator.Cluster) -> dict[str, Any]:
            try:
                with cluster.named():
                    return fit(cluster)
            except replicator.HostLostError as error:
                named.extend(error.hosts)
                errors.append(str(error))
                hosts[which].again()
                raise

        result = replicator.resilient(train, _addresses(hosts), heartbeat=3.0)
    return {
        "named": named == [hosts[which].address],
        "errors": errors,
        "losses": result,
    }


def _fit_in(folder: str, moments: dict[str, Callable[[], None]]) -> Any:
    """Returns a training by fit that has its backups in a folder.

    Args:
        folder: The folder.
        moments: Called inside a batch, and when a backup begins.
    """
    losses: dict[str, list[str]] = {}

    def now(moment: str) -> None:
        moments.get(moment, lambda: None)()

    class Watch(callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if (self.epoch, batch) == (_KILLED_IN, _BATCHES // 2):
                now("batch")

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            losses.setdefault(str(epoch), []).append(float(logs["loss"]).hex())
            if epoch == _KILLED_IN:
                now("save")

    def train(cluster: replicator.Cluster) -> dict[str, list[str]]:
        repl = replicator.Replicator(cluster.devices, variables="mirrored")
        with repl.context():
            keras.utils.set_random_seed(1)
            model = worlds.classifier(optimizer=keras.optimizers.Adam(0.02))
        repl.keras_model(model)
        size = 8 * _BATCHES - 3
        x, y = worlds.numbers(0, size, 8), worlds.labels(0, size)
        backup = callbacks.BackupAndRestore(folder, double_checkpoint=True)
        model.fit(
            *(x, y, 8, _EPOCHS),
            shuffle=False,
            verbose=0,
            callbacks=[Watch(), backup],
        )
        return losses

    return train


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    print(json.dumps(globals()[name](rest)), flush=True)
    os._exit(0)  # skips the exit of a connected process, which is not tested
