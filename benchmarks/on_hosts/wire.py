# SPDX-License-Identifier: Apache-2.0
"""The cost of the wire: both hosts send each other a number of bytes at the same time.

Each host receives as many in an all-reduce of two hosts, by any algorithm. Run by
`benchmarks.hosts` on each host: `python -m benchmarks.on_hosts.wire RANK ADDRESS PORT
NAME=BYTES...`.
"""

from __future__ import annotations

import functools
import socket
import sys
import threading
import time

from benchmarks import timing
from benchmarks.on_hosts import turns

_PATIENCE = 60.0  # seconds until the other listens


def exchange(peer: socket.socket, sent: bytes, received: bytearray) -> None:
    """Sends and receives at the same time, until everything has arrived."""
    sender = threading.Thread(target=peer.sendall, args=(sent,))
    sender.start()
    remaining = memoryview(received)
    while remaining:
        remaining = remaining[peer.recv_into(remaining) :]
    sender.join()


def make(peer: socket.socket, nbytes: int) -> timing.Run:
    """Returns a run that exchanges a number of bytes once both sides are ready."""
    sent, received = bytes(nbytes), bytearray(nbytes)

    def step() -> float:
        exchange(peer, sent, received)
        return 0.0

    def run(count: int) -> list[timing.Sample]:
        exchange(peer, b"x", bytearray(1))  # waits until the other has begun its turn
        return timing.in_turn(step)(count)

    return run


def connect(rank: int, address: str, port: int) -> socket.socket:
    """Returns the connection; rank 0 listens."""
    if rank == 0:
        with socket.create_server((address, port)) as listening:
            peer, _ = listening.accept()
    else:
        limit = time.monotonic() + _PATIENCE
        while True:
            try:
                peer = socket.create_connection((address, port))
                break
            except ConnectionRefusedError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.05)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def main(rank: str, address: str, port: str, *sizes: str) -> None:
    """Takes turns."""
    peer = connect(int(rank), address, int(port))
    sizes_by_name = [size.partition("=")[::2] for size in sizes]
    turns.answer({k: functools.partial(make, peer, int(n)) for k, n in sizes_by_name})


if __name__ == "__main__":
    main(*sys.argv[1:])
