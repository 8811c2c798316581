# SPDX-License-Identifier: Apache-2.0
"""Plan: what the replicas of a step communicate, for inspection and storage.

Made from the records that graph/lowering/record.py takes while a step is built.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TextIO

from replicator import errors
from replicator.graph.ir.placeholder import Call, OperandPolicy
from replicator.graph.lowering.record import Communication
from replicator.report import files, reading, units
from replicator.report.rows import Row, Rows


class Plan(Rows):
    """What the replicas of a step communicate: a sequence of Rows, in build order.

    On each level of the control flow, forward calls precede those of gradients.

    Example:
        >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "mean")).plan
        >>> [(row.primitive, row.reduction, row.sent) for row in plan]
        [('all_reduce', 'mean', (40, 40))]

    Attributes:
        rows: One per communication.
        devices: `devices[r]` is where replica r runs.
        notes: Costly requirements of the step and their lines: variables that could not
            be sharded.
        pulled: The number of bytes that replicas read in a step of variables on the
            devices of others, outside control flow, which no row counts; None if a size
            is unknown.
    """

    def __repr__(self) -> str:
        """Returns one line, where the rows would be a page: `print` shows them."""
        total = self.totals.per_step
        sent = f"{total.communications} communications in each step, "
        sent += units.size(total.nbytes) + " and more" * bool(total.unknown)
        return f"<Plan of {len(self)} rows: {sent}; print() shows it>"

    def print(self, file: TextIO | None = None) -> None:
        """Prints the rows and the totals as tables, by rich.

        Example:
            >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "mean")).plan
            >>> plan.print()
            Communication of 2 replicas
            ...

        Args:
            file: The text file to print to; standard output by default.

        Raises:
            ArgumentError: The file cannot be written to.
            DependencyError: rich is not installed.
        """
        if file is not None and not callable(getattr(file, "write", None)):
            raise errors.ArgumentError(
                f"a plan cannot be printed to {errors.repr_of(file)}.",
                fix="pass a text file that is open for writing, or none for standard "
                "output.",
            )
        with files.needing("rich", "print a plan"):
            from replicator.report import display
        with files.writing("a plan cannot be printed to", file):
            display.show(self, file)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the replicas as lanes, with their communications, by matplotlib.

        Example:
            >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "mean")).plan
            >>> plan.plot("plan.svg")

        Args:
            path: The picture file, .png or .svg.

        Raises:
            ArgumentError: The path has another suffix, or cannot be written to.
            DependencyError: matplotlib is not installed.
        """
        files.check_picture("a plan", path)
        with files.needing("matplotlib", "plot a plan"):
            from replicator.report import lanes
        with files.writing("a plan cannot be plotted to", path):
            lanes.draw(self, path)

    def to_json(self) -> str:
        """Returns the plan as JSON: devices, notes, rows and totals.

        Example:
            >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "mean")).plan
            >>> json.loads(plan.to_json())["totals"]["per_step"]
            {'communications': 1, 'nbytes': 80, 'unknown': 0}
        """
        rows = [
            {**dataclasses.asdict(row), "sent": row.sent, "nbytes": row.nbytes}
            for row in self.rows
        ]
        if len(self.hosts) == 1:
            for facts in rows:
                del facts["wires"], facts["seconds"]
        totals = dataclasses.asdict(self.totals)
        return json.dumps(
            {
                "devices": self.devices,
                "notes": self.notes,
                "pulled": self.pulled,
                "rows": rows,
                "totals": totals,
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that `to_json` turned into this text.

        Example:
            >>> from replicator.plan import Plan
            >>> plan = repl.build(lambda: repl.all_reduce(tf.zeros([10]), "mean")).plan
            >>> Plan.from_json(plan.to_json()) == plan
            True

        Args:
            text: The JSON text.

        Raises:
            ArgumentError: The text is not a plan.
        """
        return reading.read(cls, text)


def make_plan(
    communications: Iterable[Communication],
    devices: Sequence[str],
    algorithms: Mapping[str, str],
    notes: Sequence[str] = (),
    pulled: int | None = 0,
) -> Plan:
    """Returns the plan of a step.

    Args:
        communications: The records taken while it was built.
        devices: `devices[r]` is where replica r runs.
        algorithms: The algorithm of each primitive, for communications that do not
            record one.
        notes: Remarks about the step.
        pulled: The bytes that replicas read of variables on the devices of others.
    """
    return Plan(
        tuple(
            _row(record, algorithms[record.calls[0].primitive])
            for record in communications
        ),
        tuple(devices),
        tuple(notes),
        pulled,
    )


def _row(communication: Communication, algorithm: str) -> Row:
    options = {k: v for k, v in communication.calls[0].options.items() if v is not None}
    options.pop("algorithm", None)  # the row's algorithm says that
    nesting = communication.nesting
    if communication.calls[0].conditional:
        nesting = nesting.inside("conditional (when due)", None)
    return Row(
        primitive=communication.calls[0].pairs_as,
        reduction=options.pop("op", ""),
        options=options,
        group=tuple(call.replica_id for call in communication.calls),
        operands=tuple(call.operands for call in communication.calls),
        links=communication.links,
        algorithm=", ".join(communication.algorithms) or algorithm,
        path=nesting.path,
        times=nesting.times,
        lines=_lines(communication.calls),
        backward=communication.calls[0].backward,
        wires=communication.wires,
        seconds=communication.seconds,
        synchronizer=_synchronizers(communication.calls[0].policies),
        scope=communication.calls[0].scope,
    )


def _synchronizers(policies: Sequence[OperandPolicy]) -> str:
    """Returns the distinct synchronizers of the variables that a call reduces for."""
    synchronizers = [
        f"PS {policy.owner}"
        if policy.owner is not None
        else " group ".join(filter(None, ["all-reduce", policy.bucket]))
        for policy in policies
        if policy.variable
    ]
    return ", ".join(dict.fromkeys(synchronizers))


def _lines(calls: Sequence[Call]) -> tuple[str, ...]:
    lines = (line for call in calls for line in (call.line, *call.merged))
    return tuple(dict.fromkeys(lines))
