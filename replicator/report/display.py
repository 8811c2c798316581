# SPDX-License-Identifier: Apache-2.0
"""A plan as tables in the terminal, by rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

import rich.box
import rich.console
import rich.table

from replicator.graph.ir.placeholder import Value
from replicator.report.rows import Row, Rows, Total
from replicator.report.units import duration, size

_MOST_TENSORS = 3  # shown per call
_MOST_LINES = 3  # shown per row
_WIDTH = 150  # characters, if standard output is no terminal


def show(plan: Rows, file: TextIO | None = None) -> None:
    """Prints a plan.

    Args:
        plan: What to print.
        file: The text file to print to; standard output by default.
    """
    console = new_console(_WIDTH, file)
    console.print(_rows(plan))
    console.print(_totals(plan))
    if len(plan.hosts) > 1:
        console.print(_between(plan))
    if plan.pulled != 0:
        console.print(
            f"Not in the rows: {size(plan.pulled)} per step, for reads of variables on "
            "other replicas' devices."
        )
    for note in plan.notes:
        console.print(note)


def title(row: Row) -> str:
    """Returns the title of a row: "all_reduce sum", "broadcast root=1"."""
    options = (f"{name}={value}" for name, value in row.options.items())
    return " ".join(filter(None, [row.primitive, row.reduction, *options]))


def tensors(row: Row) -> str:
    """Lists the operands, once for all replicas that pass the same."""
    return _by_replica(row.group, [_listed(operands) for operands in row.operands])


def sent(row: Row) -> str:
    """Lists what each replica sends, once for all replicas that send the same size."""
    return _by_replica(row.group, [size(nbytes) for nbytes in row.sent])


def _listed(values: Sequence[Value]) -> str:
    text = ", ".join(map(str, values[:_MOST_TENSORS]))
    more = len(values) - _MOST_TENSORS
    return f"{text}, {more} more" if more > 0 else text or "nothing"


def _by_replica(group: Sequence[int], texts: Sequence[str]) -> str:
    """Returns a line per distinct text with its replicas, or the only text."""
    owners: dict[str, list[int]] = {}
    for replica_id, text in zip(group, texts, strict=True):
        owners.setdefault(text, []).append(replica_id)
    if len(owners) == 1:
        return texts[0]
    return "\n".join(
        f"{_ids(replica_ids)}: {text}" for text, replica_ids in owners.items()
    )


def _ids(replica_ids: Sequence[int]) -> str:
    return ", ".join(map(str, replica_ids))


def _rows(plan: Rows) -> rich.table.Table:
    """Returns the table with one row per communication."""
    several = len(plan.hosts) > 1
    on = f" on {len(plan.hosts)} hosts" if several else ""
    table = new_table(f"Communication of {len(plan.devices)} replicas{on}")
    sizes = ("within hosts", "between hosts", "takes") if several else ("each sends",)
    for name in ("", "primitive", "replicas", "tensors", *sizes, "algorithm"):
        table.add_column(name, justify="right" if name == "" else "left")
    for name in ("where", "times", "pass", "line"):
        table.add_column(name, overflow="fold")
    for number, row in enumerate(plan):
        table.add_row(
            str(number),
            title(row),
            "all" if len(row.group) == len(plan.devices) else _ids(row.group),
            tensors(row),
            *(_levels(row) if several else (sent(row),)),
            "\n".join(filter(None, [row.algorithm, row.synchronizer])),
            row.place,
            "?" if row.times is None else str(row.times),
            "backward" if row.backward else "forward",
            "\n".join(lines(row)),
        )
    return table


def lines(row: Row) -> list[str]:
    """Returns a row's lines, or the first few and the number of the others."""
    more = len(row.lines) - _MOST_LINES
    if more <= 1:
        return list(row.lines)
    return [*row.lines[:_MOST_LINES], f"and {more} more lines"]


def _levels(row: Row) -> tuple[str, str, str]:
    """Returns a row's cells for several hosts."""
    return size(row.within), size(row.between), duration(row.seconds or 0.0)


def _between(plan: Rows) -> str:
    """Describes the links between hosts."""
    text = (
        f"Communication takes {duration(plan.seconds or 0.0)} a step by the "
        "calibration, if rows run one after the other, as do messages of a link; "
        "conditionals and loops of unknown length count once."
    )
    slowest = plan.slowest_link
    if slowest is None:
        return text
    ends = (plan.hosts[host] for host in (slowest.source, slowest.destination))
    unknown = ", with tensors of unknown size" if slowest.nbytes is None else ""
    plural = "" if slowest.messages == 1 else "s"
    return (
        f"{text}\nSlowest link: {' to '.join(ends)}, {duration(slowest.seconds)} for "
        f"{size(slowest.nbytes)} in {slowest.messages} message{plural}{unknown}."
    )


def _totals(plan: Rows) -> rich.table.Table:
    """Returns the table of totals."""
    table = new_table("Totals over all replicas")
    table.caption = (
        "per step: what is certain to happen, in counted loops once per iteration. "
        "each time: what is in conditionals and in loops of unknown length (times: ?), "
        "counted once."
    )
    table.add_column("primitive")
    for rate in ("per step", "each time"):
        table.add_column(f"{rate}: number", justify="right")
        table.add_column(f"{rate}: bytes", justify="right")
    lines = [*plan.by_primitive.items(), ("all", plan.totals)]
    for name, totals in lines:
        cells = [_cells(total) for total in (totals.per_step, totals.per_turn)]
        table.add_row(name, *cells[0], *cells[1])
    return table


def _cells(total: Total) -> tuple[str, str]:
    if not total.communications:
        return "-", "-"
    more = f" and {total.unknown} of unknown size" if total.unknown else ""
    return str(total.communications), size(total.nbytes) + more


def new_console(width: int, file: TextIO | None = None) -> rich.console.Console:
    """Returns a console for a report, wide enough that no number is cut off.

    Args:
        width: The number of characters in a line, where nothing else limits it.
        file: The text file to print to, with colors only if it is a terminal; standard
            output by default.
    """
    # FORCE_COLOR, and a notebook in place of the terminal, concern standard output.
    terminal = getattr(file, "isatty", None)
    is_file = file is not None and not (terminal is not None and terminal())
    console = rich.console.Console(
        file=file,
        highlight=False,
        markup=False,
        force_terminal=False if is_file else None,
        force_jupyter=False if file is not None else None,
    )
    if not console.is_terminal:
        console.width = width
    return console


def new_table(name: str) -> rich.table.Table:
    """Returns an empty table in the style of all reports, with a title."""
    return rich.table.Table(
        title=name, title_justify="left", caption_justify="left", box=rich.box.SIMPLE
    )
