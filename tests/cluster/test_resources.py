# SPDX-License-Identifier: Apache-2.0
"""ResourceSpec reads AutoDist's files, and refuses meaningless ones."""

from __future__ import annotations

import pathlib
import re
import tempfile

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from replicator import ClusterError, ResourceSpec
from replicator.cluster.description import Host, Ssh

_FULL = """
nodes:
  - address: 10.0.0.1
    chief: true
    cpus: [0, 1]
    network_bandwidth: 10
  - address: 10.0.0.2:4444
    gpus: [0, 2]
    ssh_config: others
ssh:
  others:
    username: me
    port: 2222
    python_venv: source ~/venv/bin/activate
    key_file: ~/.ssh/id
    shared_envs: {LD_LIBRARY_PATH: /cuda, N: 3}
"""


@pytest.fixture
def spec(tmp_path):
    def read(text):
        path = tmp_path / "cluster.yml"
        path.write_text(text)
        return ResourceSpec(str(path))

    return read


def test_all_fields(spec):
    read = spec(_FULL)
    ssh = Ssh(
        username="me",
        port=2222,
        python_venv="source ~/venv/bin/activate",
        key_file="~/.ssh/id",
        shared_envs=(("LD_LIBRARY_PATH", "/cuda"), ("N", "3")),
    )
    assert read.description.hosts == (
        Host("10.0.0.1", "10.0.0.1:8888", 2, 0, chief=True, bandwidth=10.0),
        Host("10.0.0.2:4444", "10.0.0.2:4444", 1, 3, bandwidth=1.0, ssh=ssh),
    )
    assert read.chief == "10.0.0.1"
    assert read.devices == (
        *("10.0.0.1:CPU:0", "10.0.0.1:CPU:1"),
        *("10.0.0.2:4444:GPU:0", "10.0.0.2:4444:GPU:2"),
    )
    assert repr(read) == f"ResourceSpec({read.description.source!r})"


def test_a_single_node_is_the_chief(spec):
    assert spec("nodes: [{address: localhost}]").devices == ("localhost:CPU:0",)


_TWO = "nodes: [{address: a, chief: true}, {address: b, ssh_config: s}]\n"
REFUSED = {
    "empty": ("", "the file is not a mapping of nodes, ssh"),
    "list": ("[1]", "the file is not a mapping"),
    "no YAML": ("nodes: [", "it is not YAML"),
    "deep": ("[" * 5000, "it is not YAML"),
    "tag": ("!!python/object:os.system {}", "it is not YAML"),
    "twice": ("nodes: []\nnodes: []", "'nodes' is given twice"),
    "unknown": (
        "nodes: [{address: a}]\nhosts: 3",
        "'hosts' is unknown; expected nodes",
    ),
    "no nodes": ("nodes: []", '"nodes" is not a list of hosts'),
    "typo": ("nodes: [{adress: a}]", "node 0 .*'adress' is unknown; expected address"),
    "no address": ("nodes: [{cpus: [0]}]", '"address" is None'),
    "number": ("nodes: [{address: 10}]", '"address" is 10.*in quotes'),
    "bad address": ("nodes: [{address: a/b}]", "'a/b' is not an address"),
    "cpus": ("nodes: [{address: a, cpus: 2}]", r'"cpus" is not a list.*\[0, 1\]'),
    "no cpus": ("nodes: [{address: a, cpus: []}]", '"cpus" is empty'),
    "same gpu": ("nodes: [{address: a, gpus: [1, 1]}]", '"gpus" is not a list of dist'),
    "bool": ("nodes: [{address: a, gpus: [true]}]", '"gpus" is not a list'),
    "far": ("nodes: [{address: a, gpus: [99999]}]", "indices below 1024"),
    "chief": ("nodes: [{address: a, chief: 1}]", '"chief" is 1, not true or false'),
    "no chief": (
        "nodes: [{address: a, ssh_config: s}, {address: b, ssh_config: s}]\n"
        "ssh: {s: {}}",
        "exactly one node must be the chief, but none is.*Fix: write chief: true",
    ),
    "alone, not the chief": ("nodes: [{address: a, chief: false}]", "but none is"),
    "two chiefs": (
        "nodes: [{address: a, chief: true}, {address: b, chief: true}]",
        "exactly one node must be the chief, but a, b are",
    ),
    "loopback": (
        "nodes: [{address: localhost, chief: true}, {address: b, ssh_config: s}]\n"
        "ssh: {s: {}}",
        "localhost is a loopback address, which on b means b itself",
    ),
    "no ssh": (
        "nodes: [{address: a, chief: true}, {address: b}]",
        "b is not the chief and has no ssh group",
    ),
    "other ssh": (_TWO + "ssh: {t: {}}", "\"ssh_config\" is 's'; under.*there are: t"),
    "ssh list": (_TWO + "ssh: [s]", '"ssh" is not a mapping'),
    "ssh field": (_TWO + "ssh: {s: {user: me}}", "ssh 's' .*'user' is unknown"),
    "ssh port": (_TWO + "ssh: {s: {port: 0}}", '"port" is 0, which is not a port'),
    "user": (_TWO + "ssh: {s: {username: 3}}", '"username" is 3.*in quotes'),
    "envs": (_TWO + "ssh: {s: {shared_envs: [A]}}", '"shared_envs" is not a mapping'),
    "env name": (
        _TWO + "ssh: {s: {shared_envs: {A-B: x}}}",
        "'A-B' is not the name of a var",
    ),
    "env": (_TWO + "ssh: {s: {shared_envs: {A: yes}}}", "A in shared_envs is True"),
    "bandwidth": (
        "nodes: [{address: a, network_bandwidth: 0}]",
        "is 0, which is not a nu",
    ),
    "huge": (
        "nodes: [{address: a, network_bandwidth: 1" + "0" * 400 + "}]",
        "not a number",
    ),
    "NaN": (
        "nodes: [{address: a, network_bandwidth: .nan}]",
        "nan, which is not a number",
    ),
    "twice listed": (
        "nodes: [{address: a, chief: true}, {address: a, ssh_config: s}]\nssh: {s: {}}",
        "a:8888 is listed 2 times",
    ),
}


@pytest.mark.parametrize(("text", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused(spec, text, said):
    with pytest.raises(
        ClusterError, match=r"cluster\.yml.* does not describe a cluster"
    ) as e:
        spec(text)
    line = " ".join(str(e.value).split())
    assert re.search(said, line), line


@pytest.mark.parametrize("path", [None, 3, b"a.yml", ["a.yml"]])
def test_only_paths_are_taken(path):
    with pytest.raises(ClusterError, match="(?s)ResourceSpec was given.*Fix: pass the"):
        ResourceSpec(path)


def test_a_missing_file_is_named():
    with pytest.raises(
        ClusterError, match="none.yml does not describe .*there is no such file"
    ):
        ResourceSpec("/none.yml")


# --- Any file gives a valid result or a ClusterError ----------------------------------

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
_KEYS = st.sampled_from(
    "nodes ssh address cpus gpus chief ssh_config network_bandwidth".split()
    + "username port python_venv key_file shared_envs a b".split()
)
_ADDRESSES = st.sampled_from(["a", "10.0.0.1", "b:44", "localhost", "::1", "a b", ""])
_INDICES = st.lists(st.integers(-1, 5), max_size=3)
_ANYTHING = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def _some(**fields):
    return st.fixed_dictionaries({}, optional=fields)


_NODES = _some(
    address=_ADDRESSES | _SCALARS,
    cpus=_INDICES | _ANYTHING,
    gpus=_INDICES,
    chief=st.booleans() | _SCALARS,
    ssh_config=st.sampled_from(["a", "b"]) | _SCALARS,
    network_bandwidth=st.floats() | st.integers() | _ANYTHING,
)
_SSH = _some(
    username=_SCALARS,
    port=st.integers(-1, 70000),
    shared_envs=st.dictionaries(_KEYS, _SCALARS, max_size=2),
)
_FILES = _some(
    nodes=st.lists(_NODES, max_size=3) | _ANYTHING,
    ssh=st.dictionaries(st.sampled_from(["a", "b"]), _SSH, max_size=2) | _ANYTHING,
)


def _read(text):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "c.yml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            return ResourceSpec(path)
        except ClusterError as error:
            assert "does not describe a cluster: " in str(error)
            return None


@settings(deadline=None, max_examples=150)
@given(_FILES | _ANYTHING)
def test_any_structure(facts):
    read = _read(yaml.safe_dump(facts))
    if read is not None:
        nodes = facts["nodes"]
        assert [host.name for host in read.description.hosts] == [
            node["address"] for node in nodes
        ]
        chiefs = [n["address"] for n in nodes if n.get("chief", len(nodes) == 1)]
        assert chiefs == [read.chief]
        expected = []
        for node in nodes:
            names = [f"GPU:{k}" for k in node.get("gpus") or []]
            names = names or [f"CPU:{k}" for k in node.get("cpus") or [0]]
            expected += [f"{node['address']}:{name}" for name in names]
        assert list(read.devices) == expected


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="[]{}:,&*!|>-'\" \nab01<?=%#@`", max_size=40))
def test_any_text(text):
    _read(text)
