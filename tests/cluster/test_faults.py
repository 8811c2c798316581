# SPDX-License-Identifier: Apache-2.0
"""Faults, with real servers: the named host, the time, and the training's fate.

`pytest --faults=10` has each fault happen ten times; `make test-hosts` does.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf

import replicator
from replicator.cluster import faults
from tests import sampling
from tests.cluster import faulty, servers

_MOMENTS = ("build", "step", "function", "checkpoint")


def _trained(kind, moment, which, count):
    """Trains with faults in a process of its own; returns its output."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.cluster.faulty", kind, moment, str(which)]
        + [str(count)],
        cwd=servers.ROOT,
        env=servers.environment(),
        capture_output=True,
        text=True,
        timeout=servers.LIMIT * (1 + count),
    )
    assert result.returncode == 0, result.stderr[-6000:]
    results = json.loads(result.stdout.splitlines()[-1])
    print(kind, moment, which, results["seconds"])  # for statistics
    assert (
        results["wrong"] == [[]] * count
    )  # losses equal an uninterrupted run's, bitwise
    return results


def _train(kind, moment, which, count, patience=1.0):
    """Trains with faults; checks what must hold each time."""
    actual = _trained(kind, moment, which, count)
    lost = list(faulty.NAMES if which == faulty.CLIENT else [faulty.NAMES[which]])
    assert actual["named"] == [lost] * count
    limit = 1.0 if kind == "kill" else faulty.HEARTBEAT
    assert max(actual["seconds"]) < patience * limit, actual["seconds"]
    (text,) = actual["errors"]
    verb = "is" if len(lost) == 1 else "are"
    beginning = f"{len(lost)} of 2 hosts {verb} lost: {', '.join(lost)}.\n"
    assert text.startswith(beginning)
    assert "Fix: connect again and restore a checkpoint" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "which"), [pytest.param("kill", 1, marks=pytest.mark.gate), ("stop", 0)]
)
def test_a_step_is_freed_and_the_training_goes_on(kind, which):
    _train(kind, "step", which, 1, patience=5.0)  # test machines are busy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "moment", "which"),
    sampling.in_turn(["kill", "stop", "cut"], _MOMENTS, [0, 1]),
)
def test_faults(kind, moment, which, request):
    if kind == "cut":
        _need_links()
    _train(kind, moment, which, request.config.getoption("--faults"))


@pytest.mark.slow
def test_a_step_is_freed_that_waits_for_a_tensor_between_hosts():
    """This process has no call to the host that is stopped: another one waits."""
    with servers.serving(1, "--cpus=1", "--watch=stdin") as told:
        actual = servers.run_client("stopped_sender", servers.addresses(told))
    assert actual["problem"][0] == "HostLostError"
    assert f"1 of 2 hosts is lost: {actual['both'][1]}." in actual["problem"][1]


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_host_that_comes_back_is_used_again(which, request):
    _train("pause", "step", which, request.config.getoption("--faults"))


@pytest.mark.slow
@pytest.mark.parametrize("moment", _MOMENTS)
def test_a_client_that_is_cut_off(moment, request):
    _need_links()
    _train("cut", moment, faulty.CLIENT, request.config.getoption("--faults"))


@pytest.mark.slow
@pytest.mark.parametrize("moment", _MOMENTS)
@pytest.mark.parametrize("kind", ["nap", "sleep"])
def test_a_client_that_is_stopped_goes_on(kind, moment, request):
    """Its hosts are unaffected, and so is the training: nobody is lost."""
    count = request.config.getoption("--faults")
    actual = _trained(kind, moment, faulty.CLIENT, count)
    assert actual["named"] == [[]] * count
    assert actual["errors"] == []


def _need_links():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root can cut links, by ip of iproute2")


def test_without_a_cluster_errors_stay_what_they_are():
    error = tf.errors.UnavailableError(None, None, "mine")
    assert faults.lost(error) is None
    with pytest.raises(tf.errors.UnavailableError, match="mine"), faults.named():
        raise error
    assert faults.lost(ValueError("mine")) is None


def test_the_error_is_also_tensorflows():
    error = replicator.HostLostError("host-b is lost", ("host-b",))
    assert isinstance(error, replicator.ClusterError)
    assert isinstance(error, tf.errors.UnavailableError)
    assert faults.lost(error) is error
    again = pickle.loads(pickle.dumps(error))
    for one in (error, again):
        assert str(one) == one.message == "host-b is lost"
        assert one.hosts == ("host-b",)
        assert one.error_code == tf.errors.UNAVAILABLE


def test_restarts_are_a_number():
    with pytest.raises(replicator.ArgumentError, match="given max_restarts='3'"):
        replicator.resilient(print, max_restarts="3")
