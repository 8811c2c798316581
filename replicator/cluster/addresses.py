# SPDX-License-Identifier: Apache-2.0
"""Parses, checks and finds addresses of servers, "host:port". No TensorFlow."""

from __future__ import annotations

import ipaddress
import re
import socket

# The default port of servers: the first that TensorFlow's SlurmClusterResolver gives.
DEFAULT_PORT = 8888
_MOST = 65535
# Excludes typing errors only; the resolver checks the rest of a name.
_NAME = re.compile(r"[^\s/:\[\]@,]+")


def split(address: str) -> tuple[str, int | None]:
    """Returns the host and the port of an address.

    Args:
        address: "host", "host:port", "10.0.0.1:port", "[::1]:port" or "::1", optionally
            prefixed with "grpc://".

    Returns:
        The host without brackets, and the port, or None if the address has none.

    Raises:
        ValueError: The address is malformed; the message says how.
    """
    text = address.removeprefix("grpc://")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"{address!r} is not an address: expected [host]:port")
        port = rest[1:] if rest else None
    elif text.count(":") > 1:
        host, port = text, None
    else:
        host, colon, port_text = text.partition(":")
        port = port_text if colon else None
    if ":" in host or text.startswith("["):
        _check_ipv6(host, address)
    elif not (_NAME.fullmatch(host) and _is_resolvable(host)):
        raise ValueError(f"{address!r} is not an address: expected host:port")
    return host, None if port is None else _port(port, address)


def join(host: str, port: int) -> str:
    """Returns "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a name or number means the local host on every host.

    Args:
        host: A name or a number, without a port. Names are not resolved.
    """
    if host.lower().rstrip(".") in ("localhost", "ip6-localhost", "ip6-loopback"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own(host: str) -> bool:
    """Whether a name or number is of this host, as far as it knows itself.

    A host does not know the address under which others see it behind a translation of
    addresses, nor the aliases of others' ~/.ssh/config.

    Args:
        host: A name or a number, without a port. Names are resolved.
    """
    if is_loopback(host) or host.lower() == socket.gethostname().lower():
        return True
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in infos)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    """Whether an address is this host's: a socket can be bound to no other."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
            return True
    except OSError:
        return False


def own_address(towards: str, port: int | None) -> str:
    """Returns the address from which this host reaches another.

    Args:
        towards: The other host.
        port: Any port; nothing is sent there.

    Raises:
        OSError: There is no route to the other host, or its name is unknown.
    """
    if is_loopback(towards):
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(
        towards, port or DEFAULT_PORT, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def free_port() -> int:
    """Returns a free port of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _is_resolvable(host: str) -> bool:
    """Whether Python can ask for a name, whose parts have 1 to 63 letters."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _port(text: str, address: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text[:9]) <= _MOST):
        raise ValueError(
            f"{address!r} is not an address: {text!r} is not a port, 0 to {_MOST}"
        )
    return int(text)


def _check_ipv6(host: str, address: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise ValueError(f"{address!r} is not an address: expected host:port") from None
