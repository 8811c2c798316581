# SPDX-License-Identifier: Apache-2.0
"""Joins this program to the others of asynchronous mode.

Each program is a client of only the servers that hold the variables, so programs come
and go independently.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

from replicator import devices, errors
from replicator.cluster import description
from replicator.hosts.asynchronous import board as boards
from replicator.hosts.asynchronous.board import ABSENT, PRESENT, STATES, STEPS, Board
from replicator.hosts.asynchronous.membership import Member
from replicator.hosts.cluster import Cluster


class AsynchronousCluster(Cluster):
    """The servers that hold this program's variables, and the programs that share them.

    `replicator.connect` returns it in each program that `python -m replicator.launch
    --mode=async` starts. Its hosts are those of the programs, and `devices` are this
    program's own.

    Example:
        >>> cluster = replicator.connect()  # in each of two programs
        >>> cluster.num_hosts, len(cluster.devices)
        (2, 1)
        >>> builder = replicator.strategy.PS(staleness=2)
        >>> repl = replicator.Replicator(cluster.devices, strategy=builder)
        >>> with repl.context():
        ...     v = tf.Variable(1.0)  # one variable, which both programs train
        >>> float(v)
        1.0
    """

    def __init__(
        self,
        described: description.Description,
        token: Any,
        names: list[str],
        heartbeat: float,
    ) -> None:
        super().__init__(described, token, names, heartbeat)
        self.host_id = described.task or 0
        self._names = tuple(program.name for program in described.programs)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the programs."""
        return self._names

    @property
    def num_hosts(self) -> int:
        """The number of programs."""
        return len(self._names)


def join(
    described: description.Description, token: Any, limit: float, heartbeat: float
) -> AsynchronousCluster:
    """Joins this process, which is connected to the servers, to the other programs.

    Args:
        described: The servers and the programs.
        token: The connection to the servers.
        limit: How many seconds to wait for the other programs.
        heartbeat: How many seconds a program may be silent.

    Raises:
        ClusterError: A program does not join in time.
    """
    names = tuple(p.name for p in described.programs)
    program = described.task or 0
    board = Board(program, len(names), devices.of_hosts_cpus()[0])
    if program == 0:
        board.create()
    if not boards.wait(board.exists, limit):
        raise _missing(names[:1], len(names), limit)
    table = board.read()
    others = [n for n, at in enumerate(table[STATES]) if at == PRESENT and n != program]
    if table[STATES, program] != ABSENT:  # this program was restarted
        board.write(STEPS, min((int(table[STEPS, n]) for n in others), default=0))
    board.write(STATES, PRESENT)

    def absent() -> list[str]:
        table = board.read()
        return [names[n] for n, at in enumerate(table[STATES]) if at == ABSENT]

    member = Member(board, names, heartbeat, token)
    member.start()
    atexit.register(member.end)
    if not boards.wait(lambda: not absent(), limit):
        raise _missing(absent(), len(names), limit)
    member.events.note("joined")
    return AsynchronousCluster(described, token, devices.local(), heartbeat)


def _missing(names: Sequence[str], count: int, limit: float) -> errors.ClusterError:
    return errors.ClusterError(
        f"{len(names)} of {count} programs did not connect within {limit:g} s: "
        f"{', '.join(names)}.",
        fix="make every program connect; `python -m replicator.launch --mode=async` "
        "starts them all.",
    )
