# SPDX-License-Identifier: Apache-2.0
"""All traffic goes through the launcher; the servers have separate networks."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from replicator.launch import relay
from tests.launch import sshd
from tests.launch.stub import Place, line_of
from tests.launch.test_between import MEET

# Asks each server by its address, and for each other's and the program's own.
_ASK = """
import json, os, socket, threading
facts = json.loads(os.environ["REPLICATOR_CLUSTER"])
own = facts["client"]
host, _, port = own.rpartition(":")
listening = socket.create_server((host, int(port)))

def serve():
    while True:
        connection, _ = listening.accept()
        connection.recv(100)
        connection.sendall(b"program")
        connection.close()

threading.Thread(target=serve, daemon=True).start()
addresses = [host["address"] for host in facts["hosts"]]
for asked in addresses:
    for other in ["", *addresses, own]:
        if other != asked:
            host, _, port = asked.rpartition(":")
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(other.encode())
                connection.shutdown(socket.SHUT_WR)
                said = b"".join(iter(lambda: connection.recv(100), b"")).decode()
            for k, address in enumerate(addresses):
                said = said.replace(address.rpartition(":")[2], str(k))
            print("said", said, flush=True)
print("ready", *addresses, flush=True)
"""


def _refused() -> str:
    """Returns why a process here cannot have its own network; "" if it can."""
    folder = pathlib.Path(relay.__file__).parent
    tried = subprocess.run(
        [sys.executable, "-c", "import relay; relay.enter_network()"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if tried.returncode == 0 else tried.stderr.splitlines()[-1]


@pytest.fixture(autouse=True)
def _skip_without_namespaces() -> None:
    if reason := _refused():
        pytest.skip(f"no network namespaces here: {reason}")


def _said(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if line.startswith("said")]


_ALL = [
    "said server 0",
    "said by way of 0: server 1",
    "said by way of 0: program",
    "said server 1",
    "said by way of 1: server 0",
    "said by way of 1: program",
]


def test_servers_here_reach_one_another(place: Place) -> None:
    place.program(_ASK)
    result = place.launch("--nnodes=2", "--tunnel", "train.py")
    assert result.returncode == 0, result.stderr
    assert _said(result.stdout) == _ALL, result.stderr


def test_servers_here_and_there_reach_one_another(
    place: Place, remote: sshd.Server
) -> None:
    place.program(_ASK)
    hosts, *flags = remote.flags
    result = place.launch(f"{hosts},localhost", *flags, "--tunnel", "train.py")
    assert result.returncode == 0, result.stderr
    assert _said(result.stdout) == _ALL, result.stderr


def test_nothing_but_the_tunnel_reaches_servers(
    place: Place, remote: sshd.Server, tmp_path: pathlib.Path
) -> None:
    place.program(_ASK + "import signal\nsignal.pause()\n")
    folders = tmp_path / "folders"
    folders.mkdir()
    with place.start(
        *remote.flags, "--tunnel", "train.py", TMPDIR=str(folders)
    ) as started:
        line = line_of(started, "ready")
        servers = place.processes("replicator.serve --port")
        assert servers
        for pid in servers:
            network = os.readlink(f"/proc/{pid}/ns/net")
            assert network != os.readlink("/proc/self/ns/net")
        # The launcher listens in its place, for this host only.
        port = int(line.rpartition(":")[2])
        listened = [
            words[1].partition(":")[0]
            for words in map(str.split, _lines("tcp") + _lines("tcp6"))
            if words[3] == "0A" and words[1].endswith(f":{port:04X}")
        ]
        assert listened == ["0100007F"]
        started.terminate()
        started.communicate(timeout=60)
    place.expect_nothing_left()
    assert not list(folders.iterdir())


_STRANGER = """
import encodings.idna, os, socket, sys
os.setuid(65534)
for port in sys.argv[1:]:
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        connection.settimeout(20)
        try:
            connection.shutdown(socket.SHUT_WR)
            print(connection.recv(100))
        except OSError:
            print(b"")
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        pass  # is closed at once: the kernel then says that it is root's
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users' processes")
def test_doors_are_closed_to_other_users_of_this_machine(
    place: Place, remote: sshd.Server
) -> None:
    """The stub's servers answer whoever is passed on to them."""
    place.program(_ASK + "import signal\nsignal.pause()\n")
    hosts, *flags = remote.flags
    with place.start(f"{hosts},localhost", *flags, "--tunnel", "train.py") as started:
        line = line_of(started, "ready")
        ports = [word.rpartition(":")[2] for word in line.split()[1:]]
        assert len(ports) == 2
        asked = [sys.executable, "-I", "-S", "-c"]
        strangers = subprocess.run(
            [*asked, _STRANGER, *ports], capture_output=True, text=True, check=True
        )
        assert strangers.stdout == "b''\n" * 2
        user = subprocess.run(
            [*asked, _STRANGER.replace("os.setuid(65534)", ""), *ports],
            capture_output=True,
            text=True,
            check=True,
        )
        assert user.stdout.count("b'server ") == 2
        started.terminate()
        started.communicate(timeout=60)
    place.expect_nothing_left()


def _lines(name: str) -> list[str]:
    """Returns the kernel's list of sockets."""
    return pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]


def test_folders_are_removed_on_hosts_that_are_cut_off(
    place: Place, remote: sshd.Server
) -> None:
    place.program(_ASK + "import signal\nsignal.pause()\n")
    with place.start(*remote.flags, "--tunnel", "train.py") as started:
        line_of(started, "ready")
        (relayed, *_) = [
            line for line in place.processes("relay.py").values() if "accept" in line
        ]
        folder = pathlib.Path(relayed.split('"accept": ["')[1].split('/in"')[0])
        assert folder.is_dir()
        started.kill()
    place.expect_nothing_left()
    assert not folder.exists()


def test_folders_are_removed_where_the_tunnel_fails(
    place: Place, closed: sshd.Server
) -> None:
    place.program(_ASK)
    result = place.launch(*closed.flags, "--tunnel", "train.py")
    assert result.returncode == 255
    assert "127.0.0.2: --tunnel: SSH does not forward sockets there" in result.stderr
    assert not [*(closed.root / "temporary").iterdir()]


def test_a_system_without_namespaces_is_one_line(place: Place) -> None:
    """Where a process may leave neither its network nor its user's rights."""
    result = subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "sh",
            "-c",
            "echo 0 > /proc/sys/user/max_net_namespaces && exec "
            f"{sys.executable} -I {relay.__file__} "
            """'{"accept": ["/nowhere", 1], "listen": []}' true""",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(
        "replicator.launch: --tunnel: this system does not let a process have its own"
    )
    assert result.stderr.count("\n") == 1


def test_programs_of_all_hosts_meet(place: Place, remote: sshd.Server) -> None:
    place.program(MEET + "say('networks', *dict(socket.if_nameindex()).values())\n")
    hosts, *flags = remote.flags
    more = ("--mode=between", "--tunnel", f"{hosts},localhost", *flags)
    result = place.launch(*more, "train.py")
    assert result.returncode == 0, result.stderr
    lines = [line.partition("] ")[2] for line in result.stdout.splitlines()]
    assert {*lines} == {"heard 0", "heard 1", "networks lo"}
