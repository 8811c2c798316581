# SPDX-License-Identifier: Apache-2.0
"""The server of one host: `python -m replicator.serve`.

`replicator.connect` uses its devices. The server prints one line of JSON once it
listens, and ends when its standard input closes.
"""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence

import tensorflow as tf
from absl import app, flags

from replicator import command_line, errors
from replicator.cluster import addresses, closing
from replicator.command_line import BadInput
from replicator.serve import watch

_MOST_CPUS = 1024
# The server's job name until a client renames it: a session's cluster must not contain
# the name with which a server was started.
_JOB = "host"
_PORT = flags.DEFINE_integer(
    "port", 0, "The port to listen on; 0: a free port.", 0, 65535
)
_HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "The address by which the other hosts reach this one."
)
_CPUS = flags.DEFINE_integer("cpus", 1, "How many CPU devices.", 1, _MOST_CPUS)
_WATCH = flags.DEFINE_enum(
    "watch",
    None,
    ["stdin", "none"],
    "What ends the server: stdin, when standard input closes or the parent dies; none, "
    "only a signal. By default stdin if that is a pipe, else none.",
)
_PEERS = flags.DEFINE_list(
    "peers",
    [],
    "The addresses from which others connect; default any. Where the kernel allows it, "
    "the server answers no other.",
)
_INSECURE = flags.DEFINE_bool(
    "insecure", False, "Accept that whoever reaches the port can run code here."
)

_EXPOSED = (
    "TensorFlow's servers ask for no password: whoever reaches the port can run code "
    "as this user"
)


def main(argv: Sequence[str]) -> int:
    """Runs the server until it is told to end; returns the exit status of an error."""
    try:
        if len(argv) > 1:
            raise BadInput(f"unknown argument {argv[1]!r}")
        name = _host()
        follows_parent = _WATCH.value == "stdin" or (
            _WATCH.value is None and watch.is_piped()
        )
        _check_peers()
        server = _serve(_PORT.value, _CPUS.value)
    except BadInput as error:
        return command_line.fail(error)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may have ignored it
    if follows_parent:
        watch.follow_parent()
    port = int(server.target.rpartition(":")[2])
    answers = closing.close(port, closing.Audience.of(name, _PEERS.value))
    server.start()  # before, it answers nobody
    _announce(port, name, answers or closing.EVERYBODY)
    if follows_parent:
        watch.wait_for_end()
    else:
        server.join()
    os._exit(0)  # TensorFlow's servers cannot be stopped, and block an orderly exit


def _host() -> str:
    """Returns the address to announce; refuses exposed ones without --insecure."""
    try:
        name, port = addresses.split(_HOST.value)
    except ValueError as error:
        raise BadInput(f"--host: {error}") from None
    if port is not None:
        raise BadInput(f"--host={_HOST.value} has a port: give it as --port={port}")
    if name in ("0.0.0.0", "::"):
        raise BadInput(
            f"--host={name} is not an address to connect to: give the one by which the "
            "other hosts reach this one"
        )
    if not addresses.is_loopback(name) and not _INSECURE.value:
        raise BadInput(
            f"--host={name} is not a loopback address, and {_EXPOSED}; pass --insecure "
            "to accept that, on a network in which all are trusted"
        )
    return name


def _check_peers() -> None:
    for address in _PEERS.value:
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise BadInput(
                f"--peers: {address!r} is not the number of a host"
            ) from None


def _serve(port: int, cpus: int) -> tf.distribute.Server:
    _refuse_port_in_use(port)
    config = tf.compat.v1.ConfigProto(device_count={"CPU": cpus})
    try:
        return tf.distribute.Server(
            {_JOB: [addresses.join("127.0.0.1", port)]},
            _JOB,
            0,
            config=config,
            start=False,
        )
    except tf.errors.OpError as error:
        raise BadInput(f"port {port} cannot be used: {errors.summary(error)}") from None


def _refuse_port_in_use(port: int) -> None:
    """Refuses a port in use, about which TensorFlow would only write to stderr."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise BadInput(
                f"port {port} cannot be used: {reason}; --port=0 takes a free one"
            ) from None


def _announce(port: int, name: str, answers: str) -> None:
    """Prints the server's address and facts to standard output, as one line of JSON."""
    facts = {
        "replicator-serve": 1,
        "address": addresses.join(name, port),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": _CPUS.value,
        "gpus": len(tf.config.list_physical_devices("GPU")),
        "answers": answers,
    }
    if addresses.is_loopback(name) and answers != closing.ONLY_HERE:
        print(
            f"replicator.serve: {_EXPOSED}, and this system does not let it close port "
            f"{port} to other machines: a firewall must.",
            file=sys.stderr,
        )
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse)
