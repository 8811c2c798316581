# SPDX-License-Identifier: Apache-2.0
"""A description is parsed as written, or an error says where and why not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator import ClusterError
from replicator.cluster import description
from replicator.cluster.description import Description, Host

_HOST = {"name": "tom", "address": "host-a:41"}


def _text(**facts):
    return json.dumps({"version": 1, "hosts": [_HOST], **facts})


def test_what_the_launcher_writes_is_read():
    text = _text(source="--hosts=tom", heartbeat=3, client="10.0.0.9:0")
    described = description.from_json(text, "REPLICATOR_CLUSTER")
    assert described == Description(
        (Host("tom", "host-a:41"),), "--hosts=tom", "10.0.0.9:0", 3.0
    )


_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}\.example", fullmatch=True)
_HOSTS = st.builds(
    Host,
    name=st.text(max_size=9).filter(bool),
    address=st.tuples(_NAMES, st.integers(1, 65535)).map("{0[0]}:{0[1]}".format),
    cpus=st.none() | st.integers(0, 9),
    gpus=st.none() | st.integers(0, 9),
)


@given(
    st.lists(_HOSTS, min_size=1, max_size=4, unique_by=lambda host: host.address),
    st.text(),
    st.none() | st.floats(0.1, 1e6),
)
def test_json_and_back(hosts, source, heartbeat):
    described = Description(tuple(hosts), source, "10.0.0.1:0", heartbeat)
    assert description.from_json(described.to_json(), "X") == described


REFUSED = {
    "no JSON": ("{", "it is not JSON"),
    "deep": ("[" * 100_000, "it is not JSON"),
    "another": ("[]", 'it has no "version": 1'),
    "newer": (_text(version=2), 'it has no "version": 1'),
    "no hosts": (_text(hosts=[]), "it names no host"),
    "no list": (_text(hosts={}), '"hosts" is not a list'),
    "no objects": (_text(hosts=["a"]), '"hosts" is not a list of objects'),
    "no address": (_text(hosts=[{}]), 'a host has no "address"'),
    "wrong address": (_text(hosts=[{"address": "a b"}]), "'a b' is not an address"),
    "port 0": (_text(hosts=[{"address": "a:0"}]), "a:0 has port 0.*serve"),
    "name": (_text(hosts=[{**_HOST, "name": 3}]), '"name" is 3, which is not text'),
    "cpus": (
        _text(hosts=[{**_HOST, "cpus": -1}]),
        '"cpus" is -1, which is not a count',
    ),
    "gpus": (_text(hosts=[{**_HOST, "gpus": True}]), '"gpus" is True'),
    "client": (_text(client="x y"), "'x y' is not an address"),
    "heartbeat": (_text(heartbeat=0), '"heartbeat" is 0'),
    "NaN": (_text(heartbeat=float("nan")), '"heartbeat" is nan'),
    "sources": (_text(sources=["a"]), '"sources" is not a list of numbers of hosts'),
    "no sources": (_text(sources=3), '"sources" is not a list of numbers of hosts'),
    "twice": (_text(hosts=[_HOST, _HOST]), "host-a:41 is listed 2 times.*--cpus=2"),
    "mixed": (
        _text(hosts=[_HOST, {"address": "127.0.0.1:4"}]),
        "127.0.0.1 is a loopback address, which on host-a means.*Fix: give",
    ),
}


@pytest.mark.parametrize(("text", "said"), REFUSED.values(), ids=REFUSED)
def test_what_describes_no_cluster_is_refused(text, said):
    with pytest.raises(
        ClusterError, match=f"(?s)X does not describe a cluster: .*{said}"
    ) as e:
        description.from_json(text, "X")
    assert isinstance(e.value, RuntimeError)


def test_ports_that_nobody_says():
    described = description.of_addresses(["a", "b:5"], "hosts=")
    assert [host.address for host in described.hosts] == ["a:8888", "b:5"]
    assert [host.name for host in described.hosts] == ["a", "b:5"]
