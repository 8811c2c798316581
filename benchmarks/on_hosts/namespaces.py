# SPDX-License-Identifier: Apache-2.0
"""Hosts: network namespaces of this machine, joined by a link of limited rate.

Needs root, `ip` and `tc` of iproute2, and a kernel that supports them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator

# A switch's buffer before it drops packets, and the burst that may pass at once.
_LATENCY, _BURST = "50ms", "256kb"
_INTERFACE = "link0"


class Unavailable(Exception):
    """This machine cannot provide such hosts."""


@dataclasses.dataclass(frozen=True)
class Host:
    """A place where processes run.

    Attributes:
        address: The address at which the other host reaches it.
        interface: The network device with that address.
        namespace: The name for `ip netns`; None is this process's namespace.
    """

    address: str
    interface: str
    namespace: str | None = None

    def command(self, *words: str) -> list[str]:
        """Returns the command line that runs a command on this host."""
        if self.namespace is None:
            return [*words]
        return ["ip", "netns", "exec", self.namespace, *words]


LOOPBACK = (Host("127.0.0.1", "lo"), Host("127.0.0.1", "lo"))


@contextlib.contextmanager
def linked(rate: str) -> Iterator[tuple[Host, Host]]:
    """Yields two hosts that are joined by a cable, and removes them afterwards.

    Args:
        rate: Bits per second in each direction, in tc's notation, e.g. "1gbit".

    Raises:
        Unavailable: Something is missing; the message names it.
    """
    _refuse_missing()
    number = os.getpid()
    net = f"10.{200 + number % 50}.{number // 50 % 250}"
    one, other = hosts = [
        Host(f"{net}.{k + 1}", _INTERFACE, f"replicator-{number}-{k}") for k in range(2)
    ]
    try:
        for host in hosts:
            _run(f"ip netns add {host.namespace}")
        _run(
            f"ip link add {one.interface} netns {one.namespace} type veth "
            f"peer name {other.interface} netns {other.namespace}"
        )
        for host in hosts:
            _join(host, rate)
        yield one, other
    finally:
        for host in hosts:
            with contextlib.suppress(Unavailable):  # it may not have been made
                _run(f"ip netns del {host.namespace}")


def _join(host: Host, rate: str) -> None:
    inside = f"ip -n {host.namespace}"
    _run(f"{inside} addr add {host.address}/24 dev {host.interface}")
    _run(f"{inside} link set lo up")
    _run(f"{inside} link set {host.interface} up")
    _run(
        f"tc -n {host.namespace} qdisc add dev {host.interface} root tbf "
        f"rate {rate} burst {_BURST} latency {_LATENCY}"
    )


def _refuse_missing() -> None:
    if os.geteuid() != 0:
        raise Unavailable("only root makes network namespaces")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise Unavailable(f"there is no {program}: apt-get install iproute2")


def _run(words: str) -> None:
    process = subprocess.run(words.split(), capture_output=True, text=True, check=False)
    if process.returncode:
        output = " ".join(process.stderr.split()) or f"status {process.returncode}"
        raise Unavailable(f"{words}: {output}")
