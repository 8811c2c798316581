# SPDX-License-Identifier: Apache-2.0
"""Two hosts for tests that need root: network namespaces, and SSH between them.

The link between them has 1 Gbit/s and can be cut. Tests that use these are marked
`root`, and are skipped elsewhere, by the name of what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shlex
import subprocess
from collections.abc import Iterator, Mapping

import pytest

from benchmarks.on_hosts import namespaces
from tests.launch import sshd

RATE = "1gbit"
PORT = 22  # free in every namespace


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two hosts.

    Attributes:
        here: Where the launcher runs.
        there: Where an SSH server runs.
        server: That server.
    """

    here: namespaces.Host
    there: namespaces.Host
    server: sshd.Server

    def set_link(self, state: str, far: bool = False) -> None:
        """Has the link between them be "up" or "down".

        Args:
            state: Which.
            far: Whether that happens at the other end, so that nobody here is told:
                what is sent is lost.
        """
        host = self.there if far else self.here
        words = ["ip", "-n", str(host.namespace), "link", "set", host.interface]
        subprocess.run([*words, state], check=True)


@contextlib.contextmanager
def pair(
    root: pathlib.Path,
    mark: str,
    variables: Mapping[str, str] | None = None,
    hidden: tuple[pathlib.Path, pathlib.Path] | None = None,
) -> Iterator[Pair]:
    """Gives two hosts in this block; skips the test where there can be none.

    Args:
        root: A folder for keys and `.ssh`, the HOME of whoever logs in.
        mark: Of all processes of the test; see tests.launch.stub.
        variables: Of sessions there, in addition.
        hidden: A folder, and what is at its place on the other host.
    """
    if sshd.PATH is None:
        pytest.skip("there is no sshd: apt-get install openssh-server")
    pytest.importorskip("asyncssh", reason="there is no asyncssh")
    with contextlib.ExitStack() as stack:
        try:
            here, there = stack.enter_context(namespaces.linked(RATE))
        except namespaces.Unavailable as error:
            pytest.skip(f"no hosts but this one: {error}")
        config = sshd.configure(root, PORT, mark, there.address, variables)
        serve = [sshd.PATH, "-D", "-e", "-f", config]
        if hidden is not None:
            own, other = (shlex.quote(str(folder)) for folder in hidden)
            mounted = f"mount --bind {other} {own} && exec {shlex.join(serve)}"
            serve = ["unshare", "--mount", "sh", "-c", mounted]
        pid = stack.enter_context(sshd.running(there.command(*serve)))
        yield Pair(here, there, sshd.Server(root, PORT, pid, there.address))
