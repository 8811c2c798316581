# SPDX-License-Identifier: Apache-2.0
"""Two hosts for tests that need root: network namespaces, and SSH between them.

The link between them has 1 Gbit/s and can be cut. Tests that use these are marked
`root`; elsewhere they are skipped, with the missing tool as the reason.
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
        here: The host of the launcher.
        there: The host of the SSH server.
        server: The SSH server.
    """

    here: namespaces.Host
    there: namespaces.Host
    server: sshd.Server

    def set_link(self, state: str, far: bool = False) -> None:
        """Sets the link between them "up" or "down".

        Args:
            state: "up" or "down".
            far: Whether to do so at the other end, of which this host is not notified:
                packets are lost.
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
    """Yields two hosts for this block; skips the test where there can be none.

    Args:
        root: A folder for keys and `.ssh`, the HOME of SSH sessions.
        mark: The mark of all processes of the test; see tests.launch.stub.
        variables: Additional environment variables of sessions there.
        hidden: A folder, and its replacement on the other host.
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
            source, other = (shlex.quote(str(folder)) for folder in hidden)
            mounted = f"mount --bind {other} {source} && exec {shlex.join(serve)}"
            serve = ["unshare", "--mount", "sh", "-c", mounted]
        pid = stack.enter_context(sshd.running(there.command(*serve)))
        yield Pair(here, there, sshd.Server(root, PORT, pid, there.address))
