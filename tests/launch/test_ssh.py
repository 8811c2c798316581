# SPDX-License-Identifier: Apache-2.0
"""Another host is this one, by the test's own sshd; the server is a stub."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import getpass
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from replicator.launch import machines, output, questions, ssh, sync
from replicator.launch.flags import Job
from replicator.launch.hosts import JobHost, LaunchError
from tests.launch import sshd
from tests.launch.stub import Place, line_of, only

_READY = "import os\nprint('ready', os.environ['REPLICATOR_CLUSTER'], flush=True)\n"
_WAIT = _READY + "import signal\nsignal.pause()\n"


def _cluster(started: subprocess.Popen[str]) -> dict:
    """Waits until the program runs; returns its cluster description."""
    return json.loads(line_of(started, "ready").partition(" ")[2])


def test_a_server_runs_on_another_host(place: Place, remote: sshd.Server) -> None:
    place.program(_READY)
    result = place.launch(*remote.flags, "--env=STUB=sent", "--verbose", "train.py")
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("ready")]
    cluster = json.loads(line.partition(" ")[2])
    (host,) = cluster["hosts"]
    assert host["name"] == "127.0.0.2"
    assert host["address"].startswith("127.0.0.2:")
    assert host["cpus"] == 2
    # This host's address on the way to the other.
    assert cluster["client"].startswith("127.0.0.")
    assert cluster["client"].endswith(":0")
    assert "[127.0.0.2] sent None" in result.stderr.splitlines()
    assert "replicator.launch: 127.0.0.2: connected" in result.stderr


def test_hosts_here_and_there(place: Place, remote: sshd.Server) -> None:
    place.program(_READY)
    hosts, *flags = remote.flags
    result = place.launch(f"{hosts},localhost:3", *flags, "train.py")
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("ready")]
    there, here = json.loads(line.partition(" ")[2])["hosts"]
    assert (here["name"], here["cpus"]) == ("localhost", 3)
    # An address of this host that the other can reach.
    assert here["address"].partition(":")[0] == "127.0.0.1"


def test_a_cut_connection_is_found_on_both_sides(
    place: Place, remote: sshd.Server
) -> None:
    place.program(_WAIT)
    with place.start(*remote.flags, "--heartbeat=0.5", "train.py") as started:
        _cluster(started)
        connection = remote.connections()
        for pid in connection:  # it neither answers nor closes
            os.kill(pid, signal.SIGSTOP)
        _, stderr = started.communicate(timeout=60)
        # The keeper there loses its connection, and ends its process.
        place.expect_nothing_left()
        for pid in connection:
            os.kill(pid, signal.SIGKILL)
    assert started.returncode == 255
    assert "127.0.0.2: its server has ended: the connection to its host is lost" in (
        only(stderr)
    )


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (".ssh/known_hosts", "", "its host key is unknown or not the one in"),
        (".ssh/known_hosts", "{address} {key}", "its host key is unknown or not the"),
        ("authorized_keys", "", "authentication failed; --identity names a key"),
    ],
    ids=["unknown host", "changed host", "unknown user"],
)
def test_keys_that_nobody_knows_are_refused(
    place: Place, remote: sshd.Server, file: str, text: str, said: str
) -> None:
    address = (remote.root / ".ssh" / "known_hosts").read_text().split()[0]
    key = (remote.root / "authorized_keys").read_text()
    (remote.root / file).write_text(text.format(address=address, key=key))
    place.program(_READY)
    result = place.launch(*remote.flags, "train.py")
    assert result.returncode == 255
    assert f"127.0.0.2: {said}" in only(result.stderr)


@pytest.mark.parametrize("flag", ["--insecure", "--tunnel", "--mode=between"])
def test_what_the_shell_prints_before_changes_nothing(
    place: Place, noisy: sshd.Server, flag: str
) -> None:
    place.program(_READY)
    result = place.launch(*noisy.flags, flag, "train.py")
    assert result.returncode == 0, result.stderr
    assert "ready {" in result.stdout
    assert "hello" in result.stdout  # it did print


@pytest.mark.battery(3)
@pytest.mark.parametrize(
    ("flag", "status", "said"),
    [
        ("--python=/no/python", 2, "there is no /no/python; --python names another"),
        ("--python=/bin/false", 255, "/bin/false does not run: status 1"),
        ("--python=/bin/true", 255, "/bin/true is no Python interpreter"),
        ("--env=PYTHONPATH=/", 2, "has no package replicator"),
        ("--identity=/no/key", 2, "--identity: /no/key: No such file or directory"),
        ("--identity=/etc/hostname", 2, "Invalid private key"),
    ],
)
def test_what_is_missing_is_one_line(
    place: Place, remote: sshd.Server, flag: str, status: int, said: str
) -> None:
    place.program(_READY)
    flags = [f for f in remote.flags if f.partition("=")[0] != flag.partition("=")[0]]
    if "PYTHONPATH" in flag:  # an unknown interpreter
        flags.append(f"--python={os.path.realpath(sys.executable)}")
    result = place.launch(*flags, flag, "train.py")
    line = only(result.stderr)
    assert said in line
    assert result.returncode == status


def _configure(remote: sshd.Server, jump: bool) -> None:
    """Gives the server an alias, which may be reached through itself."""
    user = getpass.getuser()
    lines = [
        f"Host {sshd.ADDRESS}",
        f"  IdentityFile {remote.root}/key",
        "Host target",
        f"  HostName {sshd.ADDRESS}",
        f"  Port {remote.port}",
        f"  User {user}",
        f"  IdentityFile {remote.root}/key",
        f"  ProxyJump {user}@{sshd.ADDRESS}:{remote.port}" if jump else "",
    ]
    (remote.root / ".ssh" / "config").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("jump", [False, True])
def test_the_users_configuration_is_read(
    place: Place, remote: sshd.Server, jump: bool
) -> None:
    _configure(remote, jump)
    place.program(_READY)
    flags = ["--hosts=target", "--env=PYTHONPATH"]
    result = place.launch(*flags, "train.py")
    if jump:
        assert result.returncode == 2
        assert "target is reached through another host, which only --tunnel" in (
            only(result.stderr)
        )
        result = place.launch(*flags, "--tunnel", "train.py")
    assert result.returncode == 0, result.stderr
    assert '"name": "target"' in result.stdout


_PROXY = """
import os, socket, sys, threading
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def back():
    while data := peer.recv(65536):
        os.write(1, data)
threading.Thread(target=back, daemon=True).start()
while data := os.read(0, 65536):
    peer.sendall(data)
"""


def test_a_proxy_command_ends_without_a_word(place: Place, remote: sshd.Server) -> None:
    _configure(remote, False)
    (place.folder / "proxy.py").write_text(_PROXY)
    proxy = f"{sys.executable} -S -E {place.folder}/proxy.py %h %p"
    path = remote.root / ".ssh" / "config"
    text = path.read_text().replace("Host target", "Host target-*")
    path.write_text(f"{text}  ProxyCommand {proxy}\n")
    place.program(_WAIT)
    flags = ["--hosts=target-1,target-2,target-3", "--tunnel", "--env=PYTHONPATH"]
    with place.start(*flags, "train.py") as started:
        assert "target-3" in json.dumps(_cluster(started))
        started.send_signal(signal.SIGINT)
        _, stderr = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Unknown child process" not in stderr


@pytest.mark.parametrize(
    ("name", "flag", "said"),
    [
        (sshd.ADDRESS, "--ssh-port={port}", "refused"),
        ("no-such-host.invalid", "--insecure", ""),
        ("a" * 250, "--insecure", "hosts have no such names"),
        ("a..b", "--insecure", "hosts have no such names"),
    ],
    ids=["port", "unknown", "long", "empty"],
)
def test_unreachable_hosts_are_one_line(
    place: Place, name: str, flag: str, said: str
) -> None:
    pytest.importorskip("asyncssh", reason="there is no asyncssh")
    place.program(_READY)
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind((sshd.ADDRESS, 0))
        port = taken.getsockname()[1]
        flags = (f"--hosts={name}", flag.format(port=port))
        result = place.launch(*flags, "train.py")
    assert result.returncode == 255
    line = only(result.stderr)
    assert f"{name}: unreachable: " in line and said in line


def test_exposed_servers_are_refused() -> None:
    class Far:
        host = JobHost("host-b")
        address = "192.0.2.7"
        own_address = "192.0.2.1"

    job = Job((Far.host,), "--hosts=host-b", ("train.py",))
    with pytest.raises(LaunchError) as raised:
        machines.refuse_exposed(job, [Far])
    for text in ("host-b: whoever reaches 192.0.2.7 could run", "--tunnel", "--insec"):
        assert text in str(raised.value)
    machines.refuse_exposed(dataclasses.replace(job, tunnel=True), [Far])
    machines.refuse_exposed(dataclasses.replace(job, insecure=True), [Far])
    Far.address = "::1"
    machines.refuse_exposed(job, [Far])


def test_versions_that_differ_are_refused() -> None:
    own = {"replicator": "0.1.0", "tensorflow": "2.21.0", "path": "/a"}
    ssh.compare("host-b", "python", own, {**own, "path": "/b"})
    with pytest.raises(
        LaunchError, match=r"host-b: tensorflow is 2\.20\.0 there and 2\.21\.0 here"
    ):
        ssh.compare("host-b", "python", own, {**own, "tensorflow": "2.20.0"})
    with pytest.raises(LaunchError, match="host-b: python has no package tensorflow"):
        ssh.compare("host-b", "python", own, {**own, "tensorflow": None})


def test_hosts_without_the_program_are_refused(tmp_path: pathlib.Path) -> None:
    gone, cwd = str(tmp_path / "gone"), str(tmp_path)
    (tmp_path / "train.py").touch()

    def refuse(program: str, folder: str) -> None:
        facts = questions.program(folder, "" if program == "-m" else program)
        ssh.refuse_missing("host-b", program, folder, facts)

    for program in ("train.py", "-m", f"{cwd}/train.py"):
        refuse(program, cwd)
    refuse(f"{cwd}/train.py", gone)
    # Python would find files of the same names in the home directory.
    for program in ("train.py", "-m"):
        with pytest.raises(LaunchError, match=f"there is no {gone}, where the prog"):
            refuse(program, gone)
    for program in ("other.py", f"{cwd}/other.py"):
        with pytest.raises(LaunchError, match=f"there is no {program} in {cwd}; --sy"):
            refuse(program, cwd)


def test_only_hosts_that_are_late_are_named() -> None:
    job = Job(
        (JobHost("a", local=True), JobHost("b"), JobHost("c")),
        "",
        (),
        start_timeout=0.5,
    )

    async def reach() -> None:
        async with contextlib.AsyncExitStack() as stack:
            every = machines.Machines(job, output.Output([], None), stack)
            async with every.in_time():
                await every.run_all([asyncio.sleep(k) for k in (0, 0, 0)])
                await every.run_all([asyncio.sleep(k) for k in (0, 60, 0)])

    with pytest.raises(LaunchError, match="^b: not up after 0.5 seconds; --start-t"):
        asyncio.run(reach())


def test_files_are_copied(place: Place, remote: sshd.Server) -> None:
    place.program(_READY)
    (place.folder / ".hidden").write_text("not copied")
    result = place.launch(*remote.flags, "--sync", "train.py")
    assert result.returncode == 0, result.stderr
    message = f"1 files below 10 MiB, 0.0 MB packed, copied to {place.folder}"
    assert message in result.stderr


def test_files_arrive_as_they_are(
    remote: sshd.Server, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(remote.root))
    asyncio.run(_copy(remote, tmp_path))


async def _copy(remote: sshd.Server, tmp_path: pathlib.Path) -> None:
    source, target = tmp_path / "source", tmp_path / "deep" / "target with space"
    (source / "a b").mkdir(parents=True)
    (source / "a b" / "\u00e9").write_bytes(b"\0\xff")
    (source / "run").write_text("#!/bin/sh")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("run")
    names, _ = await sync.choose(str(source))
    job = Job((), "", (), ssh_port=remote.port, identity=f"{remote.root}/key")
    connected = await ssh.connect(JobHost(sshd.ADDRESS), job, sys.executable)
    try:
        packed = sync.pack(str(source), names)
        await connected.send(sync.unpacker(), str(target), packed)
        assert (target / "a b" / "\u00e9").read_bytes() == b"\0\xff"
        assert (target / "run").stat().st_mode & 0o777 == 0o755
        assert (target / "link").read_text() == "#!/bin/sh"
        assert not (target / "link").is_symlink()
        with pytest.raises(LaunchError, match="127.0.0.2: --sync failed: .*[Ff]ile"):
            await connected.send(sync.unpacker(), str(target / "run"), packed)
    finally:
        connected.connection.close()
        await connected.connection.wait_closed()
