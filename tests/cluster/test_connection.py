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
    with servers.serving(2, "--cpus=2") as told:
        yield [facts["address"] for facts in told]


def _device(task, index):
    return f"/job:worker/replica:0/task:{task}/device:CPU:{index}"


_ALL = [_device(task, index) for task in (0, 1) for index in (0, 1)]


# --- What steps compute ---------------------------------------------------------------


@pytest.fixture(scope="module")
def steps(addresses):
    return servers.run_client("steps", addresses)


@pytest.fixture(scope="module")
def connecting(addresses):
    return servers.run_client("connecting", addresses)


@pytest.mark.battery(2)
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
def test_two_hosts_are_as_one_device(steps, variables):
    found = steps[variables]
    assert found["overtaken"] == 0  # of 200 writes, each followed by a step
    np.testing.assert_allclose(found["losses"], steps["plain"], rtol=0, atol=1e-5)
    assert steps["plain"][-1] < 0.5 * steps["plain"][0]
    # v = [2, 3] before a step that adds v (1 + 2 + 3 + 4) to it; then v[0] = 7
    assert found["variable"] == [7.0, 33.0]
    assert found["checkpoint"] == {"saved": [2.0, 3.0, 4.0], "overtaken": 0}


# --- Devices --------------------------------------------------------------------------


@pytest.mark.slow
def test_names_of_devices(connecting, addresses):
    found = connecting["names"]
    assert found["all"] == found["none"] == _ALL
    assert found["full"] == [_ALL[3], _ALL[0]]
    own = "/job:client/replica:0/task:0/device:CPU:0"
    assert found["own"] == [own]
    assert found["client computes"] == own
    kind, said = found["missing"]
    assert kind == "DeviceError"
    assert f"{_device(1, 7)} (on {addresses[1]}) does not exist; there are" in said
    assert found["no host"][1].startswith(f"{_device(2, 0)} does not exist")
    assert "CPU:1 does not exist" in found["too late"][1]
    assert "'CPU:0' is on none of " + ", ".join(addresses) in found["host of"][1]
    assert found["repr"] == f"<Cluster of {', '.join(addresses)}: 4 devices>"
    assert found["async"][0] == "ClusterError"
    assert "be overtaken by the next step" in found["async"][1]
    assert found["after async"] == [2.0, 2.0]


def test_a_connection_without_ordering_is_refused(addresses):
    found = servers.run_client("unordered", addresses)
    for kind, said in (found["refused"], found["none"]):
        assert kind == "ClusterError"
        assert said.startswith(f"{_ALL[0]} is on another host, and what is written")
        assert "Fix: connect by replicator.connect" in said
    assert found["own"] == ["/job:localhost/replica:0/task:0/device:CPU:0"]
    assert found["connect"][0] == "ClusterError"
    assert "by tf.config.experimental_connect_to_cluster" in found["connect"][1]
    assert found["ordered"] == _ALL


@pytest.mark.slow
def test_a_process_that_is_a_task_itself():
    task = {"type": "worker", "index": 0}
    config = {"cluster": {"worker": ["127.0.0.1:0"]}, "task": task}
    found = servers.run_client("task", [], TF_CONFIG=json.dumps(config))
    assert found["value"] == 3.0
    assert found["devices"] == ["/job:worker/replica:0/task:0/device:CPU:0"]


# --- Connecting -----------------------------------------------------------------------


def test_connecting_and_closing(connecting, addresses):
    found = connecting
    assert found["kept"] == 3.0
    assert "variables and tf.functions that were made before" in found["stderr"]
    kind, said, seconds = found["missing"]
    assert kind == "ClusterError" and seconds < 20
    assert "1 of 2 hosts did not answer within 0.5 s." in said
    assert "127.0.0.1:1: connection refused" in said
    assert "the hosts are those of the list that connect was given\n" in said
    assert "Fix: start `python -m replicator.serve` on each host" in said
    assert found["variable made before"] == "InvalidArgumentError"
    assert "connected already, to " + ", ".join(addresses) in found["twice"][1]
    assert found["check"] == ["nothing", ""]
    assert "connect was called in a graph" in found["in a graph"][1]
    assert "connect was called inside a step" in found["in a step"][1]
    closed, check, alone = found["closed"]
    assert closed.endswith("4 devices, closed>") and alone == [1.0]
    assert "Fix: connect again" in check[1]
    assert found["again"] == [addresses[::-1], [4.0] * 4, False]
    assert found["one"] == [1, [2.0, 2.0]]
    assert found["error in a block"][0] == "KeyError"
    assert "tom has 2 CPU devices; REPLICATOR_CLUSTER says 3." in found["cpus"][1]
    assert "serve --cpus=3" in found["cpus"][1]
    assert found["launched"] == [
        "<Cluster of tom: 2 devices>",
        "REPLICATOR_CLUSTER",
        10.0,
    ]


@pytest.mark.slow
def test_faults(addresses):
    found = servers.run_client("faults", addresses[:1])
    assert found["sum"] == [4.0] * 4
    kinds = {"stopped": "HostLostError", "close": "ClusterError"}
    for name, kind in {**kinds, "connect": "ClusterError"}.items():
        assert found[name][0] == kind
        assert "accepts connections but does not answer" in found[name][1]
    assert "Fix: end its process" in found["close"][1]
    assert found["goes on"] == [["nothing", ""], [4.0] * 4]
    assert "1 of 2 hosts are lost" in found["killed"][1]
    assert "connection refused" in found["killed"][1]
    assert addresses[0] not in found["killed"][1]
    kind, seconds = found["step"]
    assert kind == "HostLostError" and seconds < 20
    assert "its server was started again" in found["restarted"][1]
    assert found["again"] == [[4.0] * 4, False, ["nothing", ""]]
    assert found["moved"] == [2, [4.0] * 4]


@pytest.mark.slow
def test_examples_of_docstrings(addresses):
    count, *wrong = servers.run_client("examples", addresses)
    assert not wrong, "".join(wrong)
    assert int(count.split()[0]) >= 10


# --- What needs no server -------------------------------------------------------------


@pytest.mark.parametrize("name", ["timeout", "heartbeat"])
@pytest.mark.parametrize(
    "seconds", [0, -1.0, float("nan"), float("inf"), 2**64, 10**400, "9", True]
)
def test_times_are_seconds(name, seconds):
    with pytest.raises(
        replicator.ArgumentError, match=f"(?s)connect was given {name}=.*Fix: pass sec"
    ):
        replicator.connect(["localhost:1"], **{name: seconds})


@pytest.mark.parametrize("client", ["a b", 3, "host:99999"])
def test_a_wrong_address_of_the_client(client):
    with pytest.raises(
        replicator.ArgumentError, match='(?s)was given client=.*Fix: pass "host:0"'
    ):
        replicator.connect(["localhost:1"], client=client, timeout=0.1)


def test_nothing_is_connected_where_nothing_answers():
    with pytest.raises(replicator.ClusterError, match="1 of 1 hosts did not answer"):
        replicator.connect(["localhost:1"], timeout=0.1)
    assert replicator.Replicator(["CPU:0"]).devices[0].startswith("/job:localhost/")


# --- Sessions -------------------------------------------------------------------------


@pytest.mark.slow
def test_sessions_run_on_all_hosts(addresses):
    found = servers.run_client("sessions", addresses[:1])
    assert found["kept"] == 60000
    assert found["untouched"] == [0, True]
    for case, what in (("not one", "'grpc://mine'"), ("two", "one with a cluster_def")):
        kind, said = found[case]
        assert kind == "ArgumentError"
        assert said.startswith(f"session_arguments was given config={what}")
        assert "Fix: pass a tf.compat.v1.ConfigProto without a cluster_def" in said
    # v = 1, and four replicas add up 2
    assert found["values"] == [[9.0] * 4, [17.0] * 4]
    assert set(_ALL) <= set(found["held by"])
    assert found["check"] == ["nothing", ""]
    kind, said, name = found["lost"]
    assert kind == "HostLostError"
    assert said.startswith(f"1 of 2 hosts is lost: {name}.")
    kind, said = found["closed"]
    assert kind == "ClusterError"
    assert "was asked for session_arguments" in said
