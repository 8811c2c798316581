"""class Plan: what the replicas communicate in a step, one Row per communication.

Pure data, made of what graph/record.py keeps while a step is built. Tables (table.py)
and pictures (lanes.py) are made of it elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO, overload

from replicator import errors
from replicator.graph.placeholder import Call, Value
from replicator.graph.record import Communication, Link, add


@dataclasses.dataclass(frozen=True)
class Row:
    """One communication of a step.

    Attributes:
        primitive: "all_reduce", ...; "message" for a send with its recv.
        reduction: "sum", "max", ...; "" where nothing is reduced.
        options: What else the replicas agreed on, e.g. {"root": 1}.
        group: The replicas that take part, in order.
        operands: `operands[n]` is the dtype and shape of each tensor that replica
            `group[n]` hands in.
        links: Who sends how many bytes to whom, each time.
        algorithm: How it is done: "hub", "direct", ...; "factors, hub" if some tensors
            are done by the one, some by the other.
        path: The control flow around it, outermost first; empty at the top level.
        times: How often it happens in a step; None where that is only known when the
            step runs: in a conditional, or in a loop whose turns cannot be counted.
        lines: The user's lines that ask for it, e.g. "train.py:42 in step_fn"; several
            if those of the replicas differ.
        backward: Whether it belongs to a gradient.
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

    @property
    def place(self) -> str:
        """Where it stands: "top level", or "loop body > function inner"."""
        return " > ".join(self.path) or "top level"

    @property
    def sent(self) -> tuple[int | None, ...]:
        """`sent[n]` bytes leave the device of replica `group[n]`; None: unknown."""
        return tuple(
            add(link.nbytes for link in self.links if link.source == replica_id)
            for replica_id in self.group
        )

    @property
    def nbytes(self) -> int | None:
        """How many bytes travel in all; None where a size is unknown."""
        return add(link.nbytes for link in self.links)


@dataclasses.dataclass(frozen=True)
class Total:
    """How much several communications come to.

    Attributes:
        communications: How many there are.
        nbytes: How many bytes travel, without those of unknown size.
        unknown: How many of the communications send tensors of unknown size.
    """

    communications: int = 0
    nbytes: int = 0
    unknown: int = 0


@dataclasses.dataclass(frozen=True)
class Totals:
    """What a step communicates, as far as that is known before it runs.

    Attributes:
        per_step: What happens in each step: counted loops by the number of their turns.
        per_turn: What stands in conditionals and in loops whose turns cannot be
            counted, each communication taken once.
    """

    per_step: Total
    per_turn: Total


@dataclasses.dataclass(frozen=True)
class Plan(Sequence[Row]):
    """What the replicas communicate in a step: a sequence of Rows, in build order.

    On each level of the control flow, calls stand before those of gradients.

    Attributes:
        rows: One per communication.
        devices: `devices[r]` is where replica r runs.
    """

    rows: tuple[Row, ...]
    devices: tuple[str, ...]

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...

    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def totals(self) -> Totals:
        """What all rows come to."""
        return _totals(self.rows)

    @property
    def by_primitive(self) -> dict[str, Totals]:
        """What the rows of each primitive come to."""
        names = sorted({row.primitive for row in self.rows})
        return {
            name: _totals(row for row in self.rows if row.primitive == name)
            for name in names
        }

    def print(self, file: TextIO | None = None) -> None:
        """Prints the rows and the totals as tables.

        Args:
            file: Where to; standard output, unless given.

        Raises:
            DependencyError: rich is not installed.
        """
        with needing("rich", "print a plan"):
            from replicator.plan import table
        table.show(self, file)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the replicas as lanes, and between them what they communicate.

        Args:
            path: Where the picture goes: a .png or .svg file.

        Raises:
            ArgumentError: The path has another suffix.
            DependencyError: matplotlib is not installed.
        """
        check_picture(path)
        with needing("matplotlib", "plot a plan"):
            from replicator.plan import lanes
        lanes.draw(self, path)

    def to_json(self) -> str:
        """Returns the plan as JSON: devices, rows and totals."""
        rows = [
            {**dataclasses.asdict(row), "sent": row.sent, "nbytes": row.nbytes}
            for row in self.rows
        ]
        totals = dataclasses.asdict(self.totals)
        return json.dumps(
            {"devices": self.devices, "rows": rows, "totals": totals}, indent=1
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan of which `to_json` made this text.

        Raises:
            ArgumentError: The text is no plan.
        """
        try:
            read = json.loads(text)
            rows = tuple(map(_row_of_json, read["rows"]))
            return cls(rows, tuple(read["devices"]))
        except (TypeError, KeyError, ValueError) as error:
            raise errors.ArgumentError(
                errors.compose(
                    f"this is not the JSON text of a plan: {type(error).__name__} "
                    f"{error}.",
                    fix="hand in what `Plan.to_json` returned.",
                )
            ) from error


def make_plan(
    communications: Iterable[Communication],
    devices: Sequence[str],
    algorithms: Mapping[str, str],
) -> Plan:
    """Returns the plan of a step.

    Args:
        communications: What was kept while it was built.
        devices: `devices[r]` is where replica r runs.
        algorithms: For each primitive, how it is done where the communication itself
            does not say.
    """
    return Plan(
        tuple(
            _row(kept, algorithms[kept.calls[0].primitive]) for kept in communications
        ),
        tuple(devices),
    )


def check_picture(path: str | os.PathLike[str]) -> None:
    """Raises ArgumentError unless a path names a kind of picture that can be made."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (".png", ".svg"):
        raise errors.ArgumentError(
            errors.compose(
                f"a plan cannot be plotted to {os.fspath(path)!r}: its suffix is "
                f"{suffix!r}.",
                fix="name a file that ends in .png or .svg.",
            )
        )


def _row(kept: Communication, algorithm: str) -> Row:
    options = {k: v for k, v in kept.calls[0].options.items() if v is not None}
    options.pop("algorithm", None)  # how it is done says that
    options.pop("owners", None)  # as many as operands; the links say the same
    place = kept.place
    if options.pop("when", False):  # an operand says whether, when the step runs
        place = place.inside("conditional (when due)", None)
    return Row(
        primitive=kept.calls[0].kind,
        reduction=options.pop("op", ""),
        options=options,
        group=tuple(call.replica_id for call in kept.calls),
        operands=tuple(call.operands for call in kept.calls),
        links=kept.links,
        algorithm=", ".join(kept.algorithms) or algorithm,
        path=place.path,
        times=place.times,
        lines=_lines(kept.calls),
        backward=kept.calls[0].backward,
    )


def _lines(calls: Sequence[Call]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(call.line for call in calls))


def _row_of_json(read: dict[str, Any]) -> Row:
    facts = {field.name: read[field.name] for field in dataclasses.fields(Row)}
    facts["operands"] = tuple(
        tuple(
            Value(v["dtype"], None if v["shape"] is None else tuple(v["shape"]))
            for v in own
        )
        for own in facts["operands"]
    )
    facts["links"] = tuple(Link(**link) for link in facts["links"])
    for name in ("group", "path", "lines"):
        facts[name] = tuple(facts[name])
    return Row(**facts)


def _totals(rows: Iterable[Row]) -> Totals:
    kept = list(rows)
    return Totals(
        per_step=_total((row, row.times) for row in kept if row.times is not None),
        per_turn=_total((row, 1) for row in kept if row.times is None),
    )


def _total(counted: Iterable[tuple[Row, int]]) -> Total:
    total = Total()
    for row, times in counted:
        total = Total(
            total.communications + times,
            total.nbytes + times * (row.nbytes or 0),
            total.unknown + (times if row.nbytes is None else 0),
        )
    return total


@contextlib.contextmanager
def needing(package: str, to: str) -> Iterator[None]:
    """Says how to install a package that an import in this block does not find."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise errors.DependencyError(
            errors.compose(
                f"{package} is needed to {to}, and is not installed.",
                fix=f"pip install {package}, or pip install 'replicator[plan]'.",
            )
        ) from error
