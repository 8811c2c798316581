# SPDX-License-Identifier: Apache-2.0
"""Fixtures: a place to launch from, and an SSH server for the test."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pwd
import signal
import socket
from collections.abc import Iterator

import pytest

from tests.launch import sshd
from tests.launch.stub import Place


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Lets children receive signals that this process ignores, e.g. in the background.

    A Python handler becomes the default in child processes.
    """
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.signal(n, signal.default_int_handler) for n in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[Place]:
    """A place, none of whose processes may remain afterwards."""
    new_place = Place(tmp_path)
    yield new_place
    new_place.expect_nothing_left()


@pytest.fixture
def remote(place: Place, tmp_path: pathlib.Path) -> Iterator[sshd.Server]:
    """An SSH server on 127.0.0.2, and the client flags for the launcher."""
    with _serving(place, tmp_path, {}) as server:
        yield server


@pytest.fixture
def noisy(place: Place, tmp_path: pathlib.Path) -> Iterator[sshd.Server]:
    """The same, with a shell that begins a line before each command, as users' may."""
    if not pwd.getpwuid(os.getuid()).pw_shell.endswith("/bash"):
        pytest.skip("this user's shell is not bash")
    (tmp_path / "noise").write_text("echo hello; printf 'to you'\n")
    with _serving(place, tmp_path, {"BASH_ENV": f"{tmp_path}/noise"}) as server:
        yield server


@pytest.fixture
def closed(place: Place, tmp_path: pathlib.Path) -> Iterator[sshd.Server]:
    """The same, without forwarding of sockets; TMPDIR is "temporary" in its root."""
    (tmp_path / "temporary").mkdir()
    variables = {"TMPDIR": f"{tmp_path}/temporary"}
    more = "AllowStreamLocalForwarding no\n"
    with _serving(place, tmp_path, variables, more) as server:
        yield server


@contextlib.contextmanager
def _serving(
    place: Place, tmp_path: pathlib.Path, variables: dict[str, str], more: str = ""
) -> Iterator[sshd.Server]:
    if sshd.PATH is None:
        pytest.skip("there is no sshd: apt-get install openssh-server")
    pytest.importorskip("asyncssh", reason="there is no asyncssh")
    with socket.socket() as probe:
        probe.bind((sshd.ADDRESS, 0))
        port = probe.getsockname()[1]
    config = sshd.configure(tmp_path, port, place.mark, variables=variables)
    with open(config, "a") as file:
        file.write(more)
    with sshd.running([sshd.PATH, "-D", "-e", "-f", config]) as pid:
        yield sshd.Server(tmp_path, port, pid)
