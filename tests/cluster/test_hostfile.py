# SPDX-License-Identifier: Apache-2.0
"""Files that list hosts, and mpirun's list of them."""

from __future__ import annotations

import pytest

from replicator import ClusterError
from replicator.cluster import hostfile


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "hosts"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_hosts_ports_slots_and_comments(file):
    path = file("# ours\n\na slots=2 max_slots=4\nb:4444   # the fast one\n")
    described = hostfile.read(path, "REPLICATOR_HOSTFILE")
    assert [host.address for host in described.hosts] == ["a:8888", "b:4444"]
    assert [host.cpus for host in described.hosts] == [2, None]
    assert described.source == f"REPLICATOR_HOSTFILE ({path})"


REFUSED = {
    "nothing": ("# none\n", "names no host"),
    "no text": (b"\xff\xfe\x00", "cannot be read"),
    "huge": (b"a" * (1 << 21), "longer than"),
    "option": ("a cores=2", "line 1 of .*unknown word 'cores=2'; expected slots=NUMB"),
    "count": ("a\nb slots=x", "line 2 of .*slots=x: 'x' is not a number of replicas"),
    "no count": ("b slots=0", "'0' is not a number of replicas from 1"),
    "slots as a port": ("a:2", "'a:2' names port 2.*Fix: .*slots=2"),
    "no address": ("a/b", "'a/b' is not an address"),
    "twice": ("a\na", "a:8888 is listed 2 times"),
}


@pytest.mark.parametrize(("content", "said"), REFUSED.values(), ids=REFUSED)
def test_what_lists_no_hosts_is_refused(file, content, said):
    with pytest.raises(
        ClusterError, match=f"(?s)does not describe a cluster: .*{said}|{said}"
    ):
        hostfile.read(file(content), "hosts=")


@pytest.mark.parametrize("path", ["/nonexistent/hosts", "/dev/zero", "/tmp", "a\0b"])
def test_what_is_no_file_is_refused(path):
    with pytest.raises(ClusterError, match="cannot be read"):
        hostfile.read(path, "hosts=")


def test_mpirun_names_its_hostfile(file):
    variables = {"OMPI_COMM_WORLD_RANK": "0"}
    variables["OMPI_MCA_orte_default_hostfile"] = file("a slots=3")
    (host,) = hostfile.describe_mpirun(variables).hosts
    assert (host.address, host.cpus) == ("a:8888", 3)


def test_mpirun_elsewhere():
    assert hostfile.describe_mpirun({}) is None
    with pytest.raises(ClusterError, match="(?s)process 3.*Fix: .*mpirun -np 1"):
        hostfile.describe_mpirun({"OMPI_COMM_WORLD_RANK": "3"})
    with pytest.raises(
        ClusterError, match="(?s)do not name the hosts.*REPLICATOR_HOSTF"
    ):
        hostfile.describe_mpirun({"OMPI_COMM_WORLD_RANK": "0"})
