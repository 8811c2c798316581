# SPDX-License-Identifier: Apache-2.0
"""Jobs with TensorFlow's own servers, from the side of those who want in.

Another machine is another network namespace; it tries all ports of the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from benchmarks.on_hosts import namespaces
from tests import namespaces as hosts
from tests.cluster import servers
from tests.launch.stub import MARK, Place

pytestmark = [pytest.mark.root, pytest.mark.slow]
_RATE = "1gbit"
_NEAR, _FAR = "10.199.0.1", "10.199.0.2"  # the ends of another network
_TRAIN = """
import signal
import tensorflow as tf
import replicator
cluster = replicator.connect()
repl = replicator.Replicator(cluster.devices)
repl.run(lambda: repl.all_reduce(tf.constant(1.0)))
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
"""
# Who could run code there would read a file: these are the first bytes of gRPC.
_TRY = """
import json, socket, sys
sys.path.insert(0, sys.argv[1])
import lifeline
tried = {}
for address in sys.argv[2].split(","):
    for port in map(int, sys.argv[3].split(",")):
        source = (sys.argv[4], 0) if sys.argv[4:] else None
        try:
            with socket.create_connection((address, port), 2, source) as connection:
                connection.sendall(lifeline._HELLO)
                tried[f"{address} {port}"] = bool(connection.recv(9))
        except OSError as error:
            tried[f"{address} {port}"] = False
print(json.dumps(tried))
"""


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[Place]:
    """A place whose processes have TensorFlow's servers; none may remain."""
    new_place = Place(tmp_path)
    new_place.env = {
        **servers.environment(HOME=str(tmp_path)),
        MARK: new_place.mark,
    }
    yield new_place
    new_place.expect_nothing_left()


def _ports(place: Place, host: namespaces.Host) -> list[int]:
    """Returns the ports at which processes of a job listen on a host."""
    inodes = set()
    for pid in place.processes():
        with contextlib.suppress(OSError):
            for file in pathlib.Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(file).partition(":[")[2].rstrip("]"))
    table = subprocess.run(
        host.command("cat", "/proc/net/tcp", "/proc/net/tcp6"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rows = [line.split() for line in table.splitlines()]
    return sorted(
        {
            int(row[1].rpartition(":")[2], 16)
            for row in rows
            if row[3] == "0A" and row[9] in inodes
        }
    )


def _tried(
    host: namespaces.Host, addresses: Sequence[str], ports: Sequence[int], *source: str
) -> dict[str, bool]:
    """Returns which ports answer a host, by address and port."""
    folder = str(servers.ROOT / "replicator" / "cluster")
    numbers = ",".join(map(str, ports))
    command = [sys.executable, "-I", "-S", "-c", _TRY, folder, ",".join(addresses)]
    result = subprocess.run(
        host.command(*command, numbers, *source),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout)


@contextlib.contextmanager
def _linked() -> Iterator[tuple[namespaces.Host, namespaces.Host]]:
    try:
        with namespaces.linked(_RATE) as pair:
            yield pair
    except namespaces.Unavailable as error:
        pytest.skip(f"no hosts but this one: {error}")


@contextlib.contextmanager
def _running(place: Place, *flags: str, programs: int = 1) -> Iterator[str]:
    """Runs a job in this block; yields its standard error until all are ready."""
    place.program(_TRAIN)
    errors = place.folder / "errors"
    place.prefix += ["sh", "-c", f'exec "$@" 2> {errors}', "sh"]
    with place.start(*flags, "train.py") as started:
        assert started.stdout
        lines: list[str] = []
        while sum("ready" in line for line in lines) < programs:
            lines.append(started.stdout.readline())
            assert lines[-1], errors.read_text()
        yield errors.read_text()
        started.terminate()
        started.wait(60)


@pytest.mark.parametrize(
    ("flags", "programs"),
    [
        ((), 1),
        (("--mode=between",), 2),
        (("--mode=async",), 2),
        (("--tunnel",), 1),
        (("--tunnel", "--mode=between"), 2),
    ],
    ids=["in-graph", "between", "async", "tunnel", "between-tunnel"],
)
def test_no_other_machine_reaches_a_job_of_one(
    flags: Sequence[str], programs: int, place: Place
) -> None:
    with _linked() as (here, there):
        place.prefix = here.command()
        with _running(place, "--nnodes=2", *flags, programs=programs) as errors:
            assert "answer" not in errors
            ports = _ports(place, here)
            assert len(ports) >= 2
            from_here = _tried(here, ["127.0.0.1"], ports)
            assert all(from_here.values()), "or the other tries would prove nothing"
            from_there = _tried(there, [here.address], ports)
            assert not any(from_there.values()), from_there


@pytest.mark.parametrize("mode", ["in-graph", "between", "async"])
def test_a_job_of_two_machines_answers_these_only(
    mode: str, place: Place, tmp_path: pathlib.Path
) -> None:
    """Strangers: a third address on the network, and a machine on another network."""
    programs = 1 if mode == "in-graph" else 2
    with (
        hosts.pair(tmp_path, place.mark, place.env) as pair,
        _third(pair.here) as third,
    ):
        place.prefix = pair.here.command()
        listed, *ssh = pair.server.flags
        flags = ["--insecure", f"--mode={mode}", f"{listed},localhost", *ssh]
        with _running(place, *flags, programs=programs) as errors:
            both = f"{pair.here.address}, {pair.there.address}"
            assert f"answer{'s' if mode == 'between' else ''} {both}" in errors
            stranger = pair.there.address.rpartition(".")[0] + ".77"
            _run(
                f"ip -n {pair.there.namespace} addr add {stranger}/24 "
                f"dev {pair.there.interface}"
            )
            ports = _ports(place, pair.here)
            member = _tried(pair.there, [pair.here.address], ports)
            assert all(member.values()), member
            tried = {
                **_tried(pair.there, [pair.here.address], ports, stranger),
                **_tried(third, [_NEAR, pair.here.address], ports),
            }
            assert not any(tried.values()), tried
            there = [p for p in _ports(place, pair.there) if p != hosts.PORT]
            assert there
            tried = _tried(pair.there, [pair.there.address], there, stranger)
            assert not any(tried.values()), tried


@contextlib.contextmanager
def _third(here: namespaces.Host) -> Iterator[namespaces.Host]:
    """Yields a machine on another network of a host."""
    name = f"{here.namespace}-third"
    _run(f"ip netns add {name}")
    try:
        _run(
            f"ip link add extra netns {here.namespace} type veth peer name extra "
            f"netns {name}"
        )
        for namespace, address in ((here.namespace, _NEAR), (name, _FAR)):
            _run(f"ip -n {namespace} addr add {address}/24 dev extra")
            _run(f"ip -n {namespace} link set extra up")
        _run(f"ip -n {name} route add default via {_NEAR}")
        yield namespaces.Host(_FAR, "extra", name)
    finally:
        _run(f"ip netns del {name}")


def _run(words: str) -> None:
    subprocess.run(words.split(), check=True)
