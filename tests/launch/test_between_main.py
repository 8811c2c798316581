# SPDX-License-Identifier: Apache-2.0
"""Real programs on every host: they train like one process, and end together."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess

import numpy as np
import pytest

import replicator
from tests import helpers
from tests.launch import sshd
from tests.launch.stub import Place, ready
from tests.programs import catalogue, runner

pytestmark = pytest.mark.slow
_ROOT = str(pathlib.Path(replicator.__file__).parent.parent)
_TRAIN = """
import json
import replicator
from tests.launch import test_between_main

cluster = replicator.connect()
told = test_between_main.train(replicator.Replicator(cluster.devices))
print("trained", json.dumps(told), flush=True)
"""
_FLAGS = ("--mode=between", "--nnodes=2", "--nproc-per-node=2")


def train(repl: replicator.Replicator) -> tuple[list[float], str]:
    """Returns the last step's loss, by replica, and a fingerprint of the weights."""
    program = catalogue.PROGRAMS["synchronized_trained_by_adam"]
    (losses, weights), _ = runner.outcome(program, "eager", repl)
    bits = b"".join(weight[0].tobytes() for weight in weights)
    return [float(loss) for loss in losses], hashlib.sha256(bits).hexdigest()


def _trained(done: subprocess.CompletedProcess[str]) -> dict[str, tuple]:
    """Returns each host's results."""
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "trained" in line]
    return {
        line[1 : line.index("]")]: json.loads(line.split("trained")[1])
        for line in lines
    }


def _expect_equal(found: dict[str, tuple]) -> None:
    """Fails unless two hosts have trained equally, and like one process."""
    (losses, weights), (others, other_weights) = found.values()
    assert losses == others
    assert weights == other_weights
    expected, _ = train(helpers.make(4, variables="mirrored"))
    np.testing.assert_allclose(
        np.array(losses), np.array(expected)[:2], rtol=0, atol=1e-5
    )


def test_hosts_train_alike(place: Place) -> None:
    place.program(_TRAIN)
    actual = _trained(place.launch(*_FLAGS, "train.py", PYTHONPATH=_ROOT))
    assert {*actual} == {"localhost-0", "localhost-1"}
    _expect_equal(actual)


@pytest.mark.parametrize("tunnel", [False, True])
def test_hosts_train_alike_over_ssh(
    place: Place, remote: sshd.Server, tunnel: bool
) -> None:
    place.program(_TRAIN)
    hosts, *flags = remote.flags
    more = ("--mode=between", *(["--tunnel"] if tunnel else []))
    result = place.launch(
        *more, f"{hosts},localhost:2", *flags, "train.py", PYTHONPATH=_ROOT
    )
    actual = _trained(result)
    assert {*actual} == {"127.0.0.2", "localhost"}
    _expect_equal(actual)


_STEPS = """
import json, os
import replicator
import tensorflow as tf

cluster = replicator.connect()
repl = replicator.Replicator(cluster.devices)
step_fn = lambda: repl.all_reduce(tf.constant(10.0 ** repl.replica_id))
print("sum", float(repl.run(step_fn)[0]), flush=True)
if os.environ["REPLICATOR_RESTARTS"] == "0":
    print("ready", os.getpid(), flush=True)
    while True:
        repl.run(step_fn)
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_program_that_is_killed_in_a_step(place: Place, killed: int) -> None:
    place.program(_STEPS)
    more = ("--heartbeat=5", "--max-restarts=1", "train.py")
    with place.start(*_FLAGS, *more, PYTHONPATH=_ROOT) as started:
        os.kill(ready(started, 2)[f"localhost-{killed}"], 9)
        stdout, stderr = started.communicate(timeout=300)
    assert started.returncode == 0, stderr
    message = f"localhost-{killed}: the program has ended: killed by SIGKILL"
    assert message in stderr
    assert "restarting all, 1 of 1" in stderr
    sums = [line for line in stdout.splitlines() if "sum" in line]
    assert sorted(sums) == [f"[localhost-{k}] sum 1111.0" for k in (0, 1)]
    place.expect_nothing_left()


_RESILIENT = """
import os, signal
import replicator

signal.signal(signal.SIGTERM, lambda *_: None)  # for it to say what it is told

def train(cluster):
    repl = replicator.Replicator(cluster.devices)
    step_fn = lambda: repl.all_reduce(1.0)
    print("trains", flush=True)
    repl.run(step_fn)
    if os.environ["REPLICATOR_RESTARTS"] == "1":
        return "done"
    if cluster.host_id == 1:
        os.kill(os.getpid(), 9)
    while True:
        repl.run(step_fn)

print("result", replicator.resilient(train), flush=True)
"""


def test_resilient_leaves_restarts_to_the_launcher(place: Place) -> None:
    place.program(_RESILIENT)
    flags = (*_FLAGS, "--grace=120")
    result = place.launch(*flags, "train.py", PYTHONPATH=_ROOT)
    assert result.returncode == 137
    assert result.stdout.count("trains") == 2  # once on each host
    message = "replicator.errors.HostLostError: 1 of 2 hosts is lost: localhost-1."
    assert message in result.stderr
    assert "`python -m replicator.launch --max-restarts=3`" in result.stderr
    result = place.launch(*flags, "--max-restarts=1", "train.py", PYTHONPATH=_ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("result done") == 2


_TAKES = """
import json, os, pathlib, socket
cluster = json.loads(os.environ["REPLICATOR_CLUSTER"])
first = pathlib.Path("first")
if cluster["task"] == TASK and not first.exists():
    first.touch()
    port = int(cluster["hosts"][TASK]["address"].rpartition(":")[2])
    taken = socket.create_server(("", port))
"""


@pytest.mark.parametrize("task", [0, 1])
def test_other_ports_where_one_is_taken(place: Place, task: int) -> None:
    program = _TAKES.replace("TASK", str(task)) + _STEPS.partition("if os")[0]
    place.program(program)
    result = place.launch(*_FLAGS, "train.py", PYTHONPATH=_ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("a port was taken: restarting all on other ports") == 1
    sums = [line for line in result.stdout.splitlines() if "sum" in line]
    assert sorted(sums) == [f"[localhost-{k}] sum 1111.0" for k in (0, 1)]


_ENDS = """
import os, signal, sys, time
import replicator

BEFORE
cluster = replicator.connect()
print("ready", os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""
_SAVES = "signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(5)))"


@pytest.mark.parametrize(("before", "status"), [("", 143), (_SAVES, 5)])
def test_joining_leaves_sigterm_to_the_program(
    place: Place, before: str, status: int
) -> None:
    place.program(_ENDS.replace("BEFORE", before))
    with place.start(*_FLAGS, "--grace=1000", "train.py", PYTHONPATH=_ROOT) as started:
        ready(started, 2)
        started.terminate()
        stdout, _ = started.communicate(timeout=300)
    assert started.returncode == status
    assert stdout.count("saved") == (2 if before else 0)
    place.expect_nothing_left()
