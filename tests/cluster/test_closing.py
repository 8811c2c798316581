# SPDX-License-Identifier: Apache-2.0
"""Listening sockets are closed to those who need not reach them."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from replicator.cluster import addresses, closing
from replicator.cluster.closing import Audience
from replicator.launch import sockets

_PASSES, _DROPS = 0xFFFFFFFF, 0


def _own_address() -> str:
    """Returns an address of this machine that is not of its loopback interface."""
    for address, interface in closing._own_addresses():
        if interface != "lo" and not address.startswith("fe80:"):
            return address
    pytest.skip("this machine has no network")


@contextlib.contextmanager
def _listening() -> Iterator[tuple[socket.socket, int]]:
    """Yields a socket that listens everywhere, as TensorFlow's do, and its port."""
    listening = socket.create_server(
        ("::", 0), family=socket.AF_INET6, dualstack_ipv6=True
    )
    with listening:
        yield listening, listening.getsockname()[1]


def _device(listening: socket.socket) -> str:
    told = listening.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
    return told.rstrip(b"\0").decode()


def _can_connect(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


# --- What the kernel is given ---------------------------------------------------------


def _run(program: Sequence[tuple[int, int, int, int]], packet: bytes) -> int:
    """Runs a program of the kernel's filter as the kernel documents it."""
    a, at = 0, 0
    while True:
        operation, yes, no, operand = program[at]
        at += 1
        offset = operand + 0x100000
        if operation == 0x30:  # load a byte
            a = packet[offset]
        elif operation == 0x20:  # load a word
            if offset + 4 > len(packet):
                return _DROPS
            a = int.from_bytes(packet[offset : offset + 4], "big")
        elif operation == 0x54:
            a &= operand
        elif operation == 0x15:
            at += yes if a == operand else no
        elif operation == 0x05:
            at += operand
        elif operation == 0x06:
            return operand
        else:
            raise AssertionError(operation)


def _packet(source: str) -> bytes:
    """Returns the header of a packet to somewhere."""
    address = ipaddress.ip_address(source)
    if address.version == 4:
        return bytes([0x45, *bytes(11)]) + address.packed + bytes(4)
    return bytes([0x60, *bytes(7)]) + address.packed + bytes(16)


_NETWORKS = ("10.0.0.1", "10.1.0.0/16", "127.0.0.0/8", "2001:db8::1", "fd00::/8")


@pytest.mark.parametrize(
    "source",
    ["10.0.0.1", "10.1.255.0", "127.0.0.1", "2001:db8::1", "fdff:1:2:3:4:5:6:7"],
)
def test_packets_of_the_networks_pass(source: str) -> None:
    assert _run(closing.program(_NETWORKS), _packet(source)) == _PASSES


@pytest.mark.parametrize(
    "source",
    ["10.0.0.2", "10.2.0.0", "8.8.8.8", "2001:db8::2", "2001:db8:0:1::1", "::1"],
)
def test_all_others_are_dropped(source: str) -> None:
    assert _run(closing.program(_NETWORKS), _packet(source)) == _DROPS
    assert _run(closing.program([]), _packet(source)) == _DROPS


def test_there_may_be_hundreds_of_networks() -> None:
    """Conditional jumps reach 255 instructions only."""
    networks = [f"10.0.{k}.1" for k in range(200)] + [f"fd00::{k}" for k in range(200)]
    program = closing.program(networks)
    assert len(program) <= 4096  # the kernel's limit
    assert all(max(yes, no) < 256 for _, yes, no, _ in program)
    assert _run(program, _packet("10.0.199.1")) == _PASSES
    assert _run(program, _packet("fd00::199")) == _PASSES
    assert _run(program, _packet("fd00::1:199")) == _DROPS


def test_other_protocols_are_dropped() -> None:
    assert _run(closing.program(_NETWORKS), bytes([0x50, *bytes(40)])) == _DROPS


# --- Who is meant ---------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_loopback_addresses_mean_this_machine(host: str) -> None:
    assert Audience.of(host, ["10.0.0.1"]).interface == "lo"


def test_an_address_means_its_interface() -> None:
    address = _own_address()
    interface = dict(closing._own_addresses())[address]
    assert Audience.of(address, ["10.0.0.1"]) == Audience(
        interface, ("10.0.0.1",), address
    )


@pytest.mark.parametrize("host", ["192.0.2.77", "there.is.no.such.host.invalid"])
def test_an_address_of_nobody_here_means_no_interface(host: str) -> None:
    assert Audience.of(host) == Audience()


def test_a_name_that_is_loopback_here_only_means_no_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the own name in Debian's /etc/hosts, which is another address elsewhere."""
    found = [(socket.AF_INET, 0, 0, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(closing.socket, "getaddrinfo", lambda *_, **__: found)
    assert Audience.of("host-a") == Audience()


# --- What holds -----------------------------------------------------------------------


def test_a_server_of_one_machine_is_on_its_loopback_interface() -> None:
    address = _own_address()
    with _listening() as (listening, port):
        assert _can_connect(address, port)
        assert closing.close(port, Audience.of("127.0.0.1")) == "this machine"
        assert _device(listening) == "lo"
        assert _can_connect("127.0.0.1", port)
        assert _can_connect("127.0.0.2", port)
        assert _can_connect("::1", port)
        # Connections to it, even from here, count as if they came by the network.
        assert not _can_connect(address, port)


def test_a_server_of_a_network_is_on_its_interface() -> None:
    """It answers its own machine at its address: a member of the job may be there."""
    address = _own_address()
    with _listening() as (listening, port):
        interface = dict(closing._own_addresses())[address]
        said = closing.close(port, Audience.of(address))
        assert said == f"whoever reaches {interface}"
        assert _device(listening) == interface
        assert _can_connect(address, port)
        assert not _can_connect("127.0.0.1", port)


@pytest.mark.root
@pytest.mark.parametrize("source", ["127.0.0.1", "::1"])
def test_a_filter_holds_for_both_versions(source: str) -> None:
    with _listening() as (_, port):
        said = closing.close(port, Audience(None, (source,)))
        if said != source:
            pytest.skip("this kernel does not let this user attach filters")
        assert _can_connect(source, port)
        (other,) = {"127.0.0.1", "::1"} - {source}
        assert not _can_connect(other, port)


def test_where_the_kernel_refuses_the_server_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    with _listening() as (_, port):
        monkeypatch.setattr(closing.socket.socket, "setsockopt", refused)
        for host in ("127.0.0.1", _own_address()):
            said = closing.close(port, Audience.of(host, ["10.0.0.1"]))
            assert said == "whoever reaches this machine"


def test_a_row_that_the_tables_miss_leaves_no_server_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "rows", lambda: iter(()))
    with _listening() as (listening, port):
        assert closing.close(port, Audience.of("127.0.0.1")) == "this machine"
        assert _device(listening) == "lo"


def test_no_descriptor_is_duplicated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of this process, which shares its descriptors, may be killed anywhere."""
    address = _own_address()
    with _listening() as (listening, port):
        stranger = socket.create_connection((address, port))
        with stranger, listening.accept()[0]:
            monkeypatch.delattr(os, "dup")
            before = os.listdir("/proc/self/fd")
            assert closing.close(port, Audience.of("127.0.0.1")) == "this machine"
            assert os.listdir("/proc/self/fd") == before
            stranger.settimeout(5)
            assert stranger.recv(1) == b""


def test_other_ports_stay_as_they_are() -> None:
    with _listening() as (listening, port), _listening() as (other, other_port):
        assert closing.close(port, Audience.of("127.0.0.1")) == "this machine"
        assert (_device(listening), _device(other)) == ("lo", "")
        assert closing.close(1, Audience.of("127.0.0.1")) is None
        assert closing.close(other_port, Audience.of("127.0.0.1")) == "this machine"
        assert _device(other) == "lo"


def test_connections_that_strangers_made_before_are_cut() -> None:
    address = _own_address()
    with _listening() as (listening, port), contextlib.ExitStack() as stack:
        ways = ("127.0.0.1", address, address)
        own, accepted, waiting = [
            stack.enter_context(socket.create_connection((way, port))) for way in ways
        ]
        for _ in range(2):
            stack.enter_context(listening.accept()[0])
        threading.Timer(0.1, lambda: stack.push(listening.accept()[0])).start()
        assert closing.close(port, Audience.of("127.0.0.1")) == "this machine"
        for stranger in (accepted, waiting):
            stranger.settimeout(5)
            assert stranger.recv(1) == b""
        own.settimeout(0.1)
        with pytest.raises(TimeoutError):
            own.recv(1)


# --- While TensorFlow starts one ------------------------------------------------------


def test_a_server_is_closed_while_the_call_that_starts_it_lasts() -> None:
    """Python's lock is held meanwhile, as by TensorFlow's calls."""
    port, before = addresses.free_port(), _children()
    with closing.own_server(f"127.0.0.1:{port}"):
        with socket.create_server(("", port)) as listening:
            ctypes.PyDLL(None).usleep(ctypes.c_int(900_000))
            assert _device(listening) == "lo"
    assert _children() == before


def test_a_server_is_closed_at_the_latest_when_the_call_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(closing.platform, "machine", lambda: "another")
    port = addresses.free_port()
    with contextlib.ExitStack() as stack:
        with closing.own_server(f"127.0.0.1:{port}"):
            listening = stack.enter_context(socket.create_server(("", port)))
        assert _device(listening) == "lo"


def test_a_call_that_fails_leaves_nothing() -> None:
    port, before = addresses.free_port(), _children()
    with pytest.raises(KeyError), closing.own_server(f"127.0.0.1:{port}"):
        assert len(_children()) == len(before) + 1
        raise KeyError
    assert _children() == before


def test_an_open_server_is_said_to_be_so(caplog: pytest.LogCaptureFixture) -> None:
    address = _own_address()
    port = addresses.free_port()
    with contextlib.ExitStack() as stack:
        with closing.own_server(addresses.join(address, port)):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            stack.enter_context(socket.create_server(("", port), family=family))
        assert f"This program's port {port} answers whoever reaches " in caplog.text
        caplog.clear()
        port = addresses.free_port()
        with closing.own_server(f"127.0.0.1:{port}"):
            stack.enter_context(socket.create_server(("", port)))
        assert not caplog.text


def test_systems_without_tables_are_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(closing, "_descriptors", dict)
    port = addresses.free_port()
    with closing.own_server(f"127.0.0.1:{port}"), socket.create_server(("", port)):
        pass
    assert f"port {port} answers whoever reaches this machine: they" in caplog.text


def _children() -> list[int]:
    """Returns the copies of this process."""
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        found = []
        for pid in map(int, file.read().split()):
            with contextlib.suppress(OSError):
                same = os.readlink(f"/proc/{pid}/exe") == os.readlink("/proc/self/exe")
                found += [pid] if same else []
        return found


def test_sockets_of_this_process_are_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        inode = os.fstat(server.fileno()).st_ino
        assert closing._descriptors()[inode] == server.fileno()
        rows = [row for row in sockets.rows() if row.inode == inode]
        assert [row.state for row in rows] == [sockets.LISTENING]
