# SPDX-License-Identifier: Apache-2.0
"""connect and Cluster, with real servers; each client is a process of its own."""

from __future__ import annotations

import json

import numpy as np
import pytest

import replicator
from tests.cluster import servers


@pytest.fixture(scope="module")
def addresses():
    with servers.serving(2, "--cpus=2") as server_facts:
        yield [facts["address"] for facts in server_facts]


def _device(task, index):
    return f"/job:worker/replica:0/task:{task}/device:CPU:{index}"


_ALL = [_device(task, index) for task in (0, 1) for index in (0, 1)]


# --- Results of steps -----------------------------------------------------------------


@pytest.fixture(scope="module")
def steps(addresses):
    return servers.run_client("steps", addresses)


@pytest.fixture(scope="module")
def connecting(addresses):
    return servers.run_client("connecting", addresses)


@pytest.mark.battery(3)
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
def test_two_hosts_are_as_one_device(steps, variables):
    results = steps[variables]
    assert results["overtaken"] == 0  # of 200 writes, each followed by a step
    np.testing.assert_allclose(results["losses"], steps["plain"], rtol=0, atol=1e-5)
    assert steps["plain"][-1] < 0.5 * steps["plain"][0]
    # v = [2, 3] before a step that adds v (1 + 2 + 3 + 4) to it; then v[0] = 7
    assert results["variable"] == [7.0, 33.0]
    assert results["checkpoint"] == {"saved": [2.0, 3.0, 4.0], "overtaken": 0}


# --- Devices --------------------------------------------------------------------------


@pytest.mark.slow
def test_names_of_devices(connecting, addresses):
    results = connecting["names"]
    assert results["all"] == results["none"] == _ALL
    assert results["full"] == [_ALL[3], _ALL[0]]
    own = "/job:client/replica:0/task:0/device:CPU:0"
    assert results["own"] == [own]
    assert results["client computes"] == own
    kind, message = results["missing"]
    assert kind == "DeviceError"
    assert f"{_device(1, 7)} (on {addresses[1]}) does not exist; there are" in message
    assert results["no host"][1].startswith(f"{_device(2, 0)} does not exist")
    assert "CPU:1 does not exist" in results["too late"][1]
    assert "'CPU:0' is on none of " + ", ".join(addresses) in results["host of"][1]
    assert results["repr"] == f"<Cluster of {', '.join(addresses)}: 4 devices>"
    assert results["async"][0] == "ClusterError"
    assert "be overtaken by the next step" in results["async"][1]
    assert results["after async"] == [2.0, 2.0]


def test_a_connection_without_ordering_is_refused(addresses):
    results = servers.run_client("unordered", addresses)
    for kind, message in (results["refused"], results["none"]):
        assert kind == "ClusterError"
        assert message.startswith(
            f"{_ALL[0]} is on another host, and writes to variables"
        )
        assert "Fix: connect with replicator.connect" in message
    assert results["own"] == ["/job:localhost/replica:0/task:0/device:CPU:0"]
    assert results["connect"][0] == "ClusterError"
    assert "by tf.config.experimental_connect_to_cluster" in results["connect"][1]
    assert results["ordered"] == _ALL


@pytest.mark.slow
def test_a_process_that_is_a_task_itself():
    task = {"type": "worker", "index": 0}
    config = {"cluster": {"worker": ["127.0.0.1:0"]}, "task": task}
    results = servers.run_client("task", [], TF_CONFIG=json.dumps(config))
    assert results["value"] == 3.0
    assert results["devices"] == ["/job:worker/replica:0/task:0/device:CPU:0"]


# --- Connecting -----------------------------------------------------------------------


def test_connecting_and_closing(connecting, addresses):
    results = connecting
    assert results["kept"] == 3.0
    assert "variables and tf.functions created before" in results["stderr"]
    kind, message, seconds = results["missing"]
    assert kind == "ClusterError" and seconds < 20
    assert "1 of 2 hosts did not answer within 0.5 s." in message
    assert "127.0.0.1:1: connection refused" in message
    assert "the hosts are those of the list that connect was given\n" in message
    assert "Fix: start `python -m replicator.serve` on each host" in message
    assert results["variable made before"] == "InvalidArgumentError"
    assert "already connected to " + ", ".join(addresses) in results["twice"][1]
    assert results["check"] == ["nothing", ""]
    assert "connect was called in a graph" in results["in a graph"][1]
    assert "connect was called inside a step" in results["in a step"][1]
    closed, check, alone = results["closed"]
    assert closed.endswith("4 devices, closed>") and alone == [1.0]
    assert "Fix: connect again" in check[1]
    assert results["again"] == [addresses[::-1], [4.0] * 4, False]
    assert results["one"] == [1, [2.0, 2.0]]
    assert results["error in a block"][0] == "KeyError"
    assert "tom has 2 CPU devices; REPLICATOR_CLUSTER says 3." in results["cpus"][1]
    assert "serve --cpus=3" in results["cpus"][1]
    assert results["launched"] == [
        "<Cluster of tom: 2 devices>",
        "REPLICATOR_CLUSTER",
        10.0,
    ]


@pytest.mark.slow
def test_faults(addresses):
    results = servers.run_client("faults", addresses[:1])
    assert results["sum"] == [4.0] * 4
    kinds = {"stopped": "HostLostError", "close": "ClusterError"}
    for name, kind in {**kinds, "connect": "ClusterError"}.items():
        assert results[name][0] == kind
        assert "accepts connections but does not answer" in results[name][1]
    assert "Fix: end its process" in results["close"][1]
    assert results["goes on"] == [["nothing", ""], [4.0] * 4]
    assert "1 of 2 hosts are lost" in results["killed"][1]
    assert "connection refused" in results["killed"][1]
    assert addresses[0] not in results["killed"][1]
    kind, seconds = results["step"]
    assert kind == "HostLostError" and seconds < 20
    assert "its server was started again" in results["restarted"][1]
    assert results["again"] == [[4.0] * 4, False, ["nothing", ""]]
    assert results["moved"] == [2, [4.0] * 4]


@pytest.mark.slow
def test_examples_of_docstrings(addresses):
    count, *wrong = servers.run_client("examples", addresses)
    assert not wrong, "".join(wrong)
    assert int(count.split()[0]) >= 10


# --- Tests without servers ------------------------------------------------------------


@pytest.mark.parametrize("name", ["timeout", "heartbeat"])
@pytest.mark.parametrize(
    "seconds", [0, -1.0, float("nan"), float("inf"), 2**64, 10**400, "9", True]
)
def test_times_are_seconds(name, seconds):
    with pytest.raises(
        replicator.ArgumentError, match=f"(?s)connect was given {name}=.*Fix: pass a n"
    ):
        replicator.connect(["localhost:1"], **{name: seconds})


@pytest.mark.parametrize("client", ["a b", 3, "host:99999"])
def test_a_wrong_address_of_the_client(client):
    with pytest.raises(
        replicator.ArgumentError, match='(?s)was given client=.*Fix: pass "host:0"'
    ):
        replicator.connect(["localhost:1"], client=client, timeout=0.1)


def test_an_optional_connection_is_none_where_nothing_describes_hosts():
    assert replicator.connect(optional=True) is None


@pytest.mark.parametrize("optional", [3, None, "yes"])
def test_optional_is_a_bool(optional):
    with pytest.raises(
        replicator.ArgumentError,
        match=r"(?s)connect was given optional=.*Fix: optional is one of False, True",
    ):
        replicator.connect(optional=optional)


@pytest.mark.parametrize("task", [2, -1, True, 0.0, "0"])
def test_a_task_is_the_number_of_a_host(task):
    with pytest.raises(
        replicator.ClusterError,
        match=r"(?s)connect was given task=.*has 2 hosts.*Fix: number the hosts from 0",
    ):
        replicator.connect(["localhost:1", "localhost:2"], task=task, timeout=0.1)


def test_nothing_is_connected_where_nothing_answers():
    with pytest.raises(replicator.ClusterError, match="1 of 1 hosts did not answer"):
        replicator.connect(["localhost:1"], timeout=0.1)
    assert replicator.Replicator(["CPU:0"]).devices[0].startswith("/job:localhost/")


# --- Sessions -------------------------------------------------------------------------


@pytest.mark.slow
def test_sessions_run_on_all_hosts(addresses):
    results = servers.run_client("sessions", addresses[:1])
    assert results["kept"] == 60000
    assert results["untouched"] == [0, True]
    for case, what in (("not one", "'grpc://mine'"), ("two", "one with a cluster_def")):
        kind, message = results[case]
        assert kind == "ArgumentError"
        assert message.startswith(f"a session on all hosts was given config={what}")
        assert "Fix: pass a tf.compat.v1.ConfigProto without a cluster_def" in message
    # v = 1, and four replicas add up 2
    assert results["values"] == [[9.0] * 4, [17.0] * 4]
    assert set(_ALL) <= set(results["held by"])
    assert results["check"] == ["nothing", ""]
    kind, message, name = results["lost"]
    assert kind == "HostLostError"
    assert message.startswith(f"1 of 2 hosts is lost: {name}.")
    kind, message = results["closed"]
    assert kind == "ClusterError"
    assert "was asked for session_arguments" in message
