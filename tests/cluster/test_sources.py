# SPDX-License-Identifier: Apache-2.0
"""The choice of a description from arguments, files and launchers' variables."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf

import replicator
from replicator import ClusterError
from replicator.cluster import sources

_RESOLVER = tf.distribute.cluster_resolver.SimpleClusterResolver


def _tf_config(**facts):
    return {"TF_CONFIG": json.dumps(facts)}


def _found(hosts=None, **variables):
    described = sources.find(hosts, variables)
    return [host.address for host in described.hosts], described.source


_LAUNCHED = json.dumps({"version": 1, "hosts": [{"address": "l:1"}]})
_WORKERS = {"worker": ["w:1", "w:2"]}


def test_the_first_of_several_sources_is_taken(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("f:4444")
    variables = {
        "REPLICATOR_CLUSTER": _LAUNCHED,
        **_tf_config(cluster={"worker": ["t:1"]}),
        "SLURM_JOB_NODELIST": "s",
        "REPLICATOR_HOSTFILE": str(file),
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_MCA_orte_default_hostfile": str(file),
    }
    assert _found(["a:1"], **variables) == (["a:1"], "the list that connect was given")
    results = []
    while variables:
        results.append(_found(**variables))
        del variables[next(iter(variables))]
        if [*variables] == ["OMPI_MCA_orte_default_hostfile"]:
            break
    assert results == [
        (["l:1"], "REPLICATOR_CLUSTER"),
        (["t:1"], "TF_CONFIG"),
        (["s:8888"], "Slurm (SLURM_JOB_NODELIST)"),
        (["f:4444"], f"REPLICATOR_HOSTFILE ({file})"),
        (["f:4444"], f"OMPI_MCA_orte_default_hostfile ({file})"),
    ]


def test_nothing_found_says_where_it_looked():
    with pytest.raises(ClusterError, match="no description of hosts") as caught:
        sources.find(None, {"REPLICATOR_CLUSTER": ""})
    for place in ("hosts=", "REPLICATOR_CLUSTER", "TF_CONFIG", "SLURM_JOB_NODELIST"):
        assert f"looked at {place}" in str(caught.value).replace(
            "Slurm's variables, ", ""
        )
    assert "REPLICATOR_HOSTFILE" in str(caught.value)
    assert "Fix: pass hosts=" in str(caught.value)


def test_tasks_are_in_the_order_of_their_numbers():
    workers = {str(k): f"w{k}:1" for k in (10, 2, 0)}
    text = json.dumps({"cluster": {"worker": workers}})
    found = sources.find(None, {"TF_CONFIG": text})
    assert [host.address for host in found.hosts] == ["w0:1", "w2:1", "w10:1"]
    spec = tf.train.ClusterSpec({"worker": {10: "w10:1", 9: "w9:1"}})
    assert _found(spec)[0] == ["w9:1", "w10:1"]


def test_what_hosts_may_be(tmp_path):
    spec = tf.train.ClusterSpec({"worker": {3: "w:3", 1: "w:1"}})
    assert _found(spec)[0] == ["w:1", "w:3"]
    assert _found(_RESOLVER(spec)) == (["w:1", "w:3"], "SimpleClusterResolver")
    file = tmp_path / "c.yml"
    file.write_text("nodes: [{address: 'y:1'}]")
    assert _found(replicator.ResourceSpec(file)) == (["y:1"], str(file))
    assert _found(str(file)) == _found(file) == (["y:1"], str(file))
    (tmp_path / "hosts").write_text("f:4444")
    assert _found(tmp_path / "hosts")[0] == ["f:4444"]
    assert _found(("a", "b"))[0] == ["a:8888", "b:8888"]


class _Failing(_RESOLVER):
    def cluster_spec(self):
        raise OSError("no such pod")


REFUSED = {
    "number": (3, "hosts=3.*Fix: pass a list"),
    "set": ({"a:1"}, "hosts=.*Fix: pass a list"),
    "numbers": ([1], r"hosts=\[1\]"),
    "bytes": (b"a:1", "hosts=b'a:1'"),
    "nothing": ([], "^the list that connect was given does not .*names no host"),
    "one host": ("host-a:41", r"no such file.*pass a list, \['host-a:41'\]"),
    "no yaml": ("none.yml", "none.yml does not describe a cluster: it cannot be read"),
    "failing": (_Failing(tf.train.ClusterSpec({})), "_Failing .*OSError: no such pod"),
    "other jobs": (
        tf.train.ClusterSpec({"ps": ["p:1"]}),
        "no job \"worker\", but 'ps'",
    ),
}


@pytest.mark.parametrize(("hosts", "said"), REFUSED.values(), ids=REFUSED)
def test_other_hosts_are_refused(hosts, said):
    with pytest.raises(ClusterError, match=f"(?s){said}"):
        sources.find(hosts, {})


def test_the_chief_of_tf_config_is_the_client():
    cluster = {**_WORKERS, "chief": ["c:5"], "evaluator": ["e:1"]}
    task = {"type": "chief", "index": 0}
    described = sources.find(None, _tf_config(cluster=cluster, task=task))
    assert described.client == "c:5"
    assert [host.address for host in described.hosts] == ["w:1", "w:2"]


@pytest.mark.parametrize("task", [None, {}, {"type": "worker", "index": 0}])
def test_without_a_chief_the_first_worker_connects(task):
    assert _found(**_tf_config(cluster=_WORKERS, task=task))[0] == ["w:1", "w:2"]


CONFIGS = {
    "no JSON": ("{", "TF_CONFIG .*it is not JSON"),
    "no object": ("[]", 'it has no "cluster"'),
    "no cluster": ("{}", 'it has no "cluster"'),
    "no list": ('{"cluster": {"worker": "a:1"}}', "'a:1' is not a list of addresses"),
    "no text": ('{"cluster": {"worker": [1]}}', "is not a list of addresses"),
    "no address": ('{"cluster": {"worker": ["/"]}}', "'/' is not an address"),
    "two chiefs": (
        '{"cluster": {"worker": ["w"], "chief": ["c"], "master": ["m"]}}',
        "it has 2 chiefs",
    ),
    "second worker": (
        '{"cluster": {"worker": ["w", "x"]}, "task": {"type": "worker", "index": 1}}',
        "task 1 of 'worker', but the first worker connects.*Fix: run `python -m",
    ),
    "worker beside a chief": (
        '{"cluster": {"worker": ["w"], "chief": ["c"]}, "task": {"type": "worker"}}',
        "task 0 of 'worker', but the chief connects",
    ),
    "evaluator": (
        '{"cluster": {"worker": ["w"]}, "task": {"type": "evaluator", "index": 0}}',
        "of 'evaluator'",
    ),
}


@pytest.mark.parametrize(("text", "said"), CONFIGS.values(), ids=CONFIGS)
def test_a_wrong_tf_config_is_refused(text, said):
    with pytest.raises(
        ClusterError, match=f"(?s)TF_CONFIG does not describe a cluster.*{said}|{said}"
    ):
        sources.find(None, {"TF_CONFIG": text})


def test_nothing_is_connected_where_that_is_optional_and_nothing_describes_hosts():
    assert sources.find(None, {}, optional=True) is None
    with pytest.raises(ClusterError, match="no such file"):
        sources.find("absent", {}, optional=True)
    with pytest.raises(ClusterError, match="TF_CONFIG"):
        sources.find(None, {"TF_CONFIG": "[]"}, optional=True)
    assert replicator.connect(optional=True) is None
