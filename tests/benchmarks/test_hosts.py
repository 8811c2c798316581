# SPDX-License-Identifier: Apache-2.0
"""The benchmark of hosts runs on loopback, and between namespaces if there are any."""

from __future__ import annotations

import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from benchmarks import cli, hosts
from benchmarks.on_hosts import namespaces, turns, wire
from tests.benchmarks.helpers import results


def _skip_without_namespaces():
    try:
        with namespaces.linked("1gbit"):
            pass
    except namespaces.Unavailable as error:
        pytest.skip(f"no hosts but this one: {error}")


def _abandoned():
    """Returns the namespaces whose process, which is in their names, has ended."""
    folders = pathlib.Path("/run/netns").glob("replicator-*")
    pids = {folder.name: folder.name.split("-")[1] for folder in folders}
    return {
        name for name, pid in pids.items() if not pathlib.Path("/proc", pid).exists()
    }


@pytest.mark.slow
def test_all_run_on_loopback(tmp_path):
    printed, facts = results("hosts", tmp_path, "--links=loopback", "--only=small,4KiB")
    measurements = facts["results"]["loopback"]
    assert list(measurements["small"]) == [*hosts.IN_GRAPH, hosts.BETWEEN]
    losses = [one["losses"] for one in measurements["small"].values()]
    assert losses[0][-1] < losses[0][0]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)
    summed = [hosts.NOTHING_SENT, hosts.OURS, hosts.BETWEEN, hosts.SOCKETS]
    assert list(measurements["4KiB"]) == summed
    for title in ("A step on two hosts, loopback", "All-reduce between two hosts"):
        assert title in printed


@pytest.mark.slow
@pytest.mark.root
def test_all_run_between_namespaces(tmp_path):
    _skip_without_namespaces()
    others = _abandoned()
    _, facts = results("hosts", tmp_path, "--links=1gbit", "--only=1MiB")
    measurements = facts["results"]["1gbit"]["1MiB"]
    names = [hosts.NOTHING_SENT, hosts.OURS, hosts.BETWEEN, hosts.SOCKETS]
    assert list(measurements) == names
    for name in list(measurements)[1:]:  # 8 Mbit, part of which may pass in a burst
        assert min(measurements[name]["rounds"]) > 0.5 * 8 * 2**20 / 1e9
    assert _abandoned() <= others


@pytest.mark.root
def test_hosts_are_on_networks_of_their_own():
    _skip_without_namespaces()
    with namespaces.linked("1gbit") as pair:
        inside = [
            subprocess.run(
                host.command("ip", "-o", "-4", "addr"), capture_output=True, text=True
            ).stdout
            for host in pair
        ]
        for host, other, said in zip(pair, pair[::-1], inside, strict=True):
            assert f"{host.interface}" in said and host.address in said
            assert other.address not in said


@pytest.mark.slow
@pytest.mark.root
def test_namespaces_are_removed_when_it_is_ended():
    _skip_without_namespaces()
    flags = ["--quick", "--links=1gbit", "--only=4KiB"]
    command = [sys.executable, "-m", "benchmarks.hosts", *flags]
    folder = pathlib.Path("/run/netns")
    with subprocess.Popen(
        command, cwd=cli.REPOSITORY, stderr=subprocess.PIPE
    ) as started:
        pattern = f"replicator-{started.pid}-*"
        while not list(folder.glob(pattern)):
            assert started.poll() is None
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
        assert started.wait(300) == 128 + signal.SIGTERM
    assert not list(folder.glob(pattern))


def test_without_network_namespaces_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    with pytest.raises(namespaces.Unavailable, match="only root makes network names"):
        namespaces.linked("1gbit").__enter__()
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None)
    with pytest.raises(namespaces.Unavailable, match="apt-get install iproute2"):
        namespaces.linked("1gbit").__enter__()


def test_the_wire_carries_all_bytes_both_ways():
    one, other = socket.socketpair()
    sent = [bytes([k]) * 10**6 for k in range(2)]
    received = [bytearray(10**6) for _ in range(2)]
    beside = threading.Thread(target=wire.exchange, args=(other, sent[1], received[1]))
    beside.start()
    wire.exchange(one, sent[0], received[0])
    beside.join()
    assert [bytes(data) for data in received] == sent[::-1]
    one.close()
    other.close()


_ANSWERS = """
import sys
from benchmarks import timing
from benchmarks.on_hosts import turns
def make():
    print("not an answer")
    return lambda count: [timing.Sample(RANK + 1.0, RANK + 3.0)] * count
turns.answer({"it": make})
"""


def _running(*texts: str):
    commands = [(sys.executable, "-c", text) for text in texts]
    return turns.running("a program", namespaces.LOOPBACK, commands)


def test_times_are_the_first_hosts_and_losses_the_mean():
    texts = [_ANSWERS.replace("RANK", str(rank)) for rank in range(2)]
    with _running(*texts) as program:
        run = program.run("it")
        for count in (2, 1):
            assert [tuple(sample) for sample in run(count)] == [(1.0, 3.5)] * count


def test_a_process_that_fails_ends_all_with_what_it_said(capfd):
    text = "import sys; sys.stdin.readline(); sys.exit('no luck')"
    with _running(_ANSWERS.replace("RANK", "0"), text) as program:
        with pytest.raises(SystemExit, match="a process of a program has ended with"):
            program.run("it")(1)
    assert "no luck" in capfd.readouterr().err
