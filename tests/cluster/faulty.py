# SPDX-License-Identifier: Apache-2.0
"""A training over two hosts with faults, in a process of its own.

`python -m tests.cluster.faulty KIND MOMENT HOST COUNT` prints, as JSON, the time until
the host was named, which host it was, and the losses. KIND is kill, stop, pause (a stop
that ends), cut (the link, which needs root), or nap or sleep: this process, the client,
is stopped for less than the heartbeat or for longer, and continues. HOST is 0, 1, or 2
for both, which is this process's own link; MOMENT is build, step, function (a
tf.function of the user's) or checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests.cluster import servers

HEARTBEAT = 3.0
_STEPS, EVERY = 24, 4
_FAULT_AT = 10  # halfway between two checkpoints
NAMES = ("host-a", "host-b")
CLIENT = 2  # in place of a host's number
_STOPPED = {"nap": 0.4 * HEARTBEAT, "sleep": 2.0 * HEARTBEAT}  # seconds


class Hosts:
    """Two servers at a time, with a third one starting."""

    def __init__(self, kind: str) -> None:
        self._kind, self._count = kind, 0
        self._net = f"10.{77 + os.getpid() % 100}.0"
        self._bridge = f"rb{os.getpid()}"
        if kind == "cut":
            _ip(f"link add {self._bridge} type bridge")
            _ip(f"addr add {self._net}.1/24 dev {self._bridge}")
            _ip(f"link set {self._bridge} up")
        self._started = [self._start() for _ in range(3)]
        self.active = [self._started.pop(0), self._started.pop(0)]
        self.describe()

    def describe(self) -> None:
        """Waits for the two, and makes `connect` find them, as the launcher does."""
        hosts = []
        for name, server in zip(NAMES, self.active, strict=True):
            if not hasattr(server, "address"):
                server.address = servers.facts(server)["address"]
            hosts.append({"name": name, "address": server.address})
        described = {"version": 1, "heartbeat": HEARTBEAT, "hosts": hosts}
        os.environ["REPLICATOR_CLUSTER"] = json.dumps(described)

    def fail(self, which: int) -> None:
        """Makes one fail; called in any thread."""
        if self._kind in _STOPPED:
            stop_for(_STOPPED[self._kind])
            return
        for server in self._chosen(which):
            if self._kind == "kill":
                server.kill()
            elif self._kind in ("stop", "pause"):
                server.send_signal(signal.SIGSTOP)
            else:
                _ip(f"link set rv{server.number} down")

    def replace(self, which: int) -> None:
        """Replaces or repairs it; called in the main thread."""
        if self._kind == "pause" or which == CLIENT:
            for server in self._chosen(which):
                if self._kind == "pause":
                    server.send_signal(signal.SIGCONT)
                else:
                    _ip(f"link set rv{server.number} up")
            return
        self._end(self.active[which])
        self.active[which] = self._started.pop(0)
        self._started.append(self._start())
        self.describe()

    def _chosen(self, which: int) -> list[Any]:
        return self.active if which == CLIENT else [self.active[which]]

    def end(self) -> None:
        """Ends all."""
        for server in [*self.active, *self._started]:
            self._end(server)
        _ip(f"link del {self._bridge}")

    def _network(self, number: int) -> str:
        """Joins a namespace to the bridge; returns its address."""
        address = f"{self._net}.{self._count + 1}"
        _ip(f"netns add rn{number}")
        _ip(f"link add rv{number} type veth peer name rp{number} netns rn{number}")
        _ip(f"link set rv{number} master {self._bridge} up")
        _ip(f"-n rn{number} addr add {address}/24 dev rp{number}")
        _ip(f"-n rn{number} link set rp{number} up")
        _ip(f"-n rn{number} link set lo up")
        return address

    def _start(self) -> Any:
        self._count += 1
        number = os.getpid() % 10000 * 100 + self._count
        if self._kind != "cut":
            server: Any = servers.start("--cpus=1", "--watch=stdin")
        else:
            there = self._network(number)
            command = ["ip", "netns", "exec", f"rn{number}", sys.executable]
            flags = ["-m", "replicator.serve", f"--host={there}", "--insecure"]
            server = subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=servers.environment(),
            )
        server.number = number
        return server

    def _end(self, server: Any) -> None:
        server.kill()
        server.communicate()
        if self._kind == "cut":
            _ip(f"link del rv{server.number}")
            _ip(f"netns del rn{server.number}")


def stop_for(seconds: float) -> None:
    """Stops this process for a number of seconds."""
    waking = f"sleep {seconds}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", waking]):
        os.kill(os.getpid(), signal.SIGSTOP)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=False, capture_output=True)


class Training:
    """The training; `fault` is called at a given moment.

    Args:
        moment: The moment.
        fault: Makes something fail.
        steps: The number of steps.
    """

    def __init__(
        self, moment: str, fault: Callable[[], None], steps: int = _STEPS
    ) -> None:
        self._moment, self._fault, self._steps = moment, fault, steps
        self._fault_at = _FAULT_AT
        generator = np.random.default_rng(3)
        x = generator.normal(size=[96, 8]).astype(np.float32)
        self._data = x, np.argmax(x @ generator.normal(size=[8, 3]), axis=1)
        self.losses: dict[int, str] = {}
        self.wrong: list[Any] = []
        self.errors: list[str] = []
        self.named: list[str] = []
        self.at = 0.0  # seconds from the fault to the error that named them

    def train(self, cluster: replicator.Cluster, folder: str) -> None:
        """Trains, and records errors."""
        try:
            with cluster.named():
                self._train(cluster, folder)
        except replicator.HostLostError as error:
            self.at = time.monotonic()
            self.named += error.hosts
            self.errors.append(str(error))
            raise

    def _train(self, cluster: replicator.Cluster, folder: str) -> None:
        repl = replicator.Replicator(cluster.devices)
        with repl.context():
            tf.keras.utils.set_random_seed(1)
            layers = tf.keras.layers
            model = tf.keras.Sequential([layers.Dense(16, "tanh"), layers.Dense(3)])
            optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.02))
        data = tf.data.Dataset.from_tensor_slices(self._data)
        data = data.shuffle(50, seed=5).repeat().batch(8)
        checkpoint = cluster.checkpoint(
            folder, model=model, optimizer=optimizer, inputs=repl.inputs
        )

        self._begin(repl, checkpoint.step)

        def step_fn(batch: Any) -> tf.Tensor:
            self._now("build", self._fault_at)
            x, y = batch
            with tf.GradientTape() as tape:
                each = tf.keras.losses.sparse_categorical_crossentropy(
                    y, model(x), True
                )
                loss = tf.reduce_mean(each)
            v = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, v), v, strict=True))
            return repl.all_reduce(loss, "mean")

        step = repl.build(step_fn, data)
        run = tf.function(step) if self._moment == "function" else step
        for k in checkpoint.steps(self._steps, every=EVERY):
            self._now("step", k)
            self._now("function", k)
            loss = float(run()[0]).hex()
            if k in self.losses and self.losses[k] != loss:
                self.wrong.append([k, self.losses[k], loss])
            self.losses[k] = loss
            if (k + 1) % EVERY == 0:
                self._now("checkpoint", k - 1)

    def _begin(self, repl: replicator.Replicator, step: int) -> None:
        """Called before a step, with the number of completed ones."""

    def _now(self, moment: str, k: int) -> None:
        if moment == self._moment and k == self._fault_at:
            self._fault()


class Fault:
    """One host that fails, once.

    Args:
        hosts: All hosts.
        which: The host that fails.
        late: The maximum number of seconds after the moment.
        at_once: Whether to wait for the failure.
    """

    def __init__(self, hosts: Hosts, which: int, late: float, at_once: bool) -> None:
        self._hosts, self._which = hosts, which
        self._late, self._at_once = late, at_once
        self._begun = False
        self.at = 0.0

    def __call__(self) -> None:
        """Causes it, once."""
        if self._begun:
            return
        self._begun = True
        timer = threading.Timer(random.uniform(0, self._late), self._fail)
        timer.start()
        if self._at_once:
            timer.join()

    def _fail(self) -> None:
        self.at = time.monotonic()
        self._hosts.fail(self._which)


# Maximum seconds after the moment. A step takes milliseconds: the fault is inside one,
# or between two.
LATE = {"build": 0.0, "step": 0.01, "function": 0.01, "checkpoint": 0.03}


def once(hosts: Hosts, moment: str, which: int, losses: dict[int, str]) -> Training:
    """Trains with a fault; compares with the losses of a training without one."""
    fault = Fault(hosts, which, LATE[moment], moment == "build")
    training = Training(moment, fault)
    training.losses = dict(losses)
    with tempfile.TemporaryDirectory() as folder:

        def train(cluster: replicator.Cluster) -> None:
            try:
                training.train(cluster, folder)
            except Exception:
                hosts.replace(which)
                raise

        replicator.resilient(train)
    assert fault.at, "there was no fault"
    training.at -= fault.at
    return training


def main(kind: str, moment: str, which: int, count: int) -> dict[str, Any]:
    """Trains without a fault, and then `count` times with one."""
    hosts = Hosts(kind)
    try:
        plain = Training("never", lambda: None)
        with replicator.connect() as cluster, tempfile.TemporaryDirectory() as folder:
            plain.train(cluster, folder)
        assert len(plain.losses) == _STEPS
        trained = [once(hosts, moment, which, plain.losses) for _ in range(count)]
    finally:
        hosts.end()
    return {
        "seconds": [round(training.at, 2) for training in trained],
        "named": [training.named for training in trained],
        "wrong": [training.wrong for training in trained],
        "errors": trained[0].errors,
    }


if __name__ == "__main__":
    words = sys.argv[1:]
    print(json.dumps(main(words[0], words[1], int(words[2]), int(words[3]))))
    sys.stdout.flush()
    os._exit(0)
