# SPDX-License-Identifier: Apache-2.0
"""The communications of a step, one Row each: pure data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

from replicator.costs import hosts
from replicator.graph.ir.placeholder import Value
from replicator.graph.lowering.record import Link, Wire, add


@dataclasses.dataclass(frozen=True)
class Row:
    """One communication of a step.

    Example:
        >>> row = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "max")).plan[0]
        >>> row.primitive, row.reduction, row.algorithm, row.times
        ('all_reduce', 'max', 'hub', 1)
        >>> [(link.source, link.destination, link.nbytes) for link in row.links]
        [(0, 1, 40), (1, 0, 40)]

    Attributes:
        primitive: "all_reduce", ...; "message" for a send with its recv.
        reduction: "sum", "max", ...; "" if nothing is reduced.
        options: The other options that the replicas agreed on, e.g. {"root": 1}.
        group: The replicas that take part, in order.
        operands: `operands[n]` is the dtype and shape of each tensor that replica
            `group[n]` passes.
        links: Which replica sends how many bytes to which, per execution.
        algorithm: "hub", "direct", ...; "factors, hub" if some tensors use the one and
            some the other.
        path: The enclosing control flow, outermost first; empty at the top level.
        times: Executions per step; None if the number is only known when the step runs:
            in a conditional, or in a loop whose iterations cannot be counted.
        lines: The user's lines that request it, e.g. "train.py:42 in step_fn"; several
            if the replicas' lines differ, or for values that travel together.
        backward: Whether it belongs to a gradient.
        wires: Which host sends how much to which, per execution; empty on one host.
        seconds: Its time between hosts in seconds, by the calibration, on otherwise
            idle links; None on one host.
        synchronizer: The distinct synchronizers of its variables: "PS 0" if replica 0
            owns them, "all-reduce group 1"; "" for no variable.
        scope: The name scope of its ops, e.g. "communicate/all_reduce/3"; in functions,
            prefixed by the names of the calling ops.
    """

    primitive: str
    reduction: str
    options: Mapping[str, Any]
    group: tuple[int, ...]
    operands: tuple[tuple[Value, ...], ...]
    links: tuple[Link, ...]
    algorithm: str
    path: tuple[str, ...]
    times: int | None
    lines: tuple[str, ...]
    backward: bool
    wires: tuple[Wire, ...] = ()
    seconds: float | None = None
    synchronizer: str = ""
    scope: str = ""

    @property
    def place(self) -> str:
        """Its place, e.g. "top level" or "loop body > function inner".

        Example:
            >>> @tf.function
            ... def inner():
            ...     return repl.all_reduce(1.0)
            >>> repl.build(lambda: inner()).plan[0].place
            'function inner'
        """
        return " > ".join(self.path) or "top level"

    @property
    def sent(self) -> tuple[int | None, ...]:
        """`sent[n]` bytes leave the device of replica `group[n]`; None if unknown.

        Example:
            >>> row = repl.build(lambda: repl.broadcast(tf.zeros([10]), root=1)).plan[0]
            >>> row.group, row.sent
            ((0, 1), (0, 40))
        """
        return tuple(
            add(link.nbytes for link in self.links if link.source == replica_id)
            for replica_id in self.group
        )

    @property
    def nbytes(self) -> int | None:
        """The number of bytes sent in all; None if a size is unknown.

        Example:
            >>> row = repl.build(lambda: repl.all_reduce(tf.zeros([10]))).plan[0]
            >>> row.nbytes
            80
        """
        return add(link.nbytes for link in self.links)

    @property
    def between(self) -> int | None:
        """The number of bytes sent between hosts; None if a size is unknown.

        Example:
            >>> repl = replicator.Replicator(cluster.devices)  # four, on two hosts
            >>> row = repl.build(lambda: repl.all_reduce(tf.zeros([10]))).plan[0]
            >>> row.between  # one message each way
            80
        """
        return add(wire.nbytes for wire in self.wires)

    @property
    def within(self) -> int | None:
        """The number of bytes sent within hosts; None if a size is unknown.

        Example:
            >>> repl = replicator.Replicator(cluster.devices)  # four, on two hosts
            >>> row = repl.build(lambda: repl.all_reduce(tf.zeros([10]))).plan[0]
            >>> row.within, row.nbytes
            (160, 240)
        """
        if self.nbytes is None or self.between is None:
            return None
        return self.nbytes - self.between


@dataclasses.dataclass(frozen=True)
class Total:
    """The sum over several communications.

    Example:
        >>> def step_fn():
        ...     return [repl.all_reduce(tf.zeros([10]), op) for op in ("min", "max")]
        >>> repl.build(step_fn).plan.totals.per_step
        Total(communications=2, nbytes=160, unknown=0)

    Attributes:
        communications: The number of communications.
        nbytes: The number of bytes sent, without tensors of unknown size.
        unknown: The number of communications that send tensors of unknown size.
    """

    communications: int = 0
    nbytes: int = 0
    unknown: int = 0


@dataclasses.dataclass(frozen=True)
class Totals:
    """The traffic of a step, as far as it is known before the step runs.

    Example:
        >>> def step_fn(x):
        ...     while tf.reduce_max(x) > 1.0:
        ...         x = repl.all_reduce(x, "mean") / 2.0
        ...     return repl.all_reduce(tf.reduce_sum(x), "mean")
        >>> data = tf.data.Dataset.from_tensors(tf.ones([10])).repeat()
        >>> totals = repl.build(step_fn, data).plan.totals
        >>> totals.per_step.nbytes, totals.per_turn.nbytes
        (8, 80)

    Attributes:
        per_step: Communications that each step certainly executes, with counted loops
            multiplied by their iterations.
        per_turn: Communications in conditionals and in loops whose iterations cannot be
            counted, each counted once.
    """

    per_step: Total
    per_turn: Total


@dataclasses.dataclass(frozen=True)
class Rows(Sequence[Row]):
    """The Rows of a step, in build order.

    On each level of the control flow, forward calls precede those of gradients.

    Attributes:
        rows: One per communication.
        devices: `devices[r]` is where replica r runs.
        notes: Costly requirements of the step and their lines: variables that could not
            be sharded.
        pulled: The number of bytes that replicas read in a step of variables on the
            devices of others, outside control flow, which no row counts; None if a size
            is unknown.
    """

    rows: tuple[Row, ...]
    devices: tuple[str, ...]
    notes: tuple[str, ...] = ()
    pulled: int | None = 0

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...

    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that the replicas run on, in order of first appearance.

        Example:
            >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "mean")).plan
            >>> plan.hosts
            ('/job:localhost/replica:0/task:0',)
        """
        return tuple(dict.fromkeys(map(hosts.host_of, self.devices)))

    @property
    def slowest_link(self) -> Wire | None:
        """The link between two hosts that is busy longest in a step; None on one host.

        Conditionals and loops of unknown length count once.

        Example:
            >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "mean")).plan
            >>> print(plan.slowest_link)
            None
        """
        wires_by_ends: dict[tuple[int, int], list[tuple[int, Wire]]] = {}
        for row in self.rows:
            times = 1 if row.times is None else row.times
            for wire in row.wires:
                ends = wire.source, wire.destination
                wires_by_ends.setdefault(ends, []).append((times, wire))
        links = [
            Wire(
                *ends,
                sum(times * wire.messages for times, wire in wires),
                add(w.nbytes if w.nbytes is None else n * w.nbytes for n, w in wires),
                sum(times * wire.seconds for times, wire in wires),
            )
            for ends, wires in sorted(wires_by_ends.items())
        ]
        return max(links, key=lambda wire: wire.seconds, default=None)

    @property
    def seconds(self) -> float | None:
        """The time of all rows, one after the other; None on one host.

        By the calibration; conditionals and loops of unknown length count once.

        Example:
            >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "mean")).plan
            >>> print(plan.seconds)
            None
        """
        if len(self.hosts) == 1:
            return None
        return sum(
            (1 if row.times is None else row.times) * (row.seconds or 0.0)
            for row in self.rows
        )

    @property
    def totals(self) -> Totals:
        """The totals over all rows.

        Example:
            >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "mean")).plan
            >>> plan.totals.per_step
            Total(communications=1, nbytes=80, unknown=0)
        """
        return _totals(self.rows)

    @property
    def by_primitive(self) -> dict[str, Totals]:
        """The totals over the rows of each primitive, by its name.

        Example:
            >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "mean")).plan
            >>> plan.by_primitive["all_reduce"].per_step.nbytes
            80
        """
        names = sorted({row.primitive for row in self.rows})
        return {
            name: _totals(row for row in self.rows if row.primitive == name)
            for name in names
        }


def _totals(rows: Iterable[Row]) -> Totals:
    all_rows = list(rows)
    return Totals(
        per_step=_total((row, row.times) for row in all_rows if row.times is not None),
        per_turn=_total((row, 1) for row in all_rows if row.times is None),
    )


def _total(counts: Iterable[tuple[Row, int]]) -> Total:
    total = Total()
    for row, times in counts:
        total = Total(
            total.communications + times,
            total.nbytes + times * (row.nbytes or 0),
            total.unknown + (times if row.nbytes is None else 0),
        )
    return total
