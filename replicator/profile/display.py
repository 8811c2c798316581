# SPDX-License-Identifier: Apache-2.0
"""A report as tables in the terminal, by rich."""

from __future__ import annotations

from typing import TextIO

import rich.box
import rich.console
import rich.table

from replicator.plan import display
from replicator.profile import report as reports
from replicator.profile.report import APART, HERE, Report

_WIDTH = 120  # where there is no terminal that has one


def show(report: Report, file: TextIO | None = None) -> None:
    """Prints a report.

    Args:
        report: What to print.
        file: Where to; standard output, unless given.
    """
    console = rich.console.Console(file=file, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(_parts(report))
    console.print(_predicted(report))
    for where in (HERE, APART):
        text = report.verdict(where)
        console.print(text[0].upper() + text[1:])
    console.print(
        "T_comp is a step of one replica alone, T_sync what a step of R takes more; "
        "each keeps its batch, so it pays while T_sync / T_comp < R - 1 (Das 2018)."
    )


def _parts(report: Report) -> rich.table.Table:
    measured = report.measured
    count = measured.replicas
    on = "" if measured.cores is None else f", which share {measured.cores} cores"
    by = f" under {report.strategy}" if report.strategy else ""
    table = _table(f"A step of {report.name}{by} on {count} replicas{on}")
    table.add_column("part")
    table.add_column("takes", justify="right")
    table.add_column("of the step", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("line", overflow="fold")

    def add(name: str, seconds: float, *cells: str) -> None:
        share = f"{seconds / measured.step:.1%}"
        table.add_row(name, display.duration(seconds), share, *cells)

    add("the call", measured.fixed)
    add("computing", measured.compute)
    for row, seconds in zip(measured.rows, measured.communication, strict=True):
        lines = "\n".join(row.lines)
        add(display.title(row), seconds, display.size(row.nbytes), lines)
    add("a step", measured.step)
    add("a step of one replica alone", measured.alone)
    return table


def _predicted(report: Report) -> rich.table.Table:
    network = report.network
    speed = f"{8e-9 / network.link:.3g} Gbit/s" if network.link else "any bandwidth"
    table = _table("Predicted")
    table.caption = (
        f"{reports.title(HERE)}: calibrated and measured. {reports.title(APART)}: one "
        f"replica each, {speed}, {network.message * 1e6:.3g} us per message."
    )
    table.add_column("replicas", justify="right")
    for where in (HERE, APART):
        for name in ("step", "T_sync / T_comp", "speed-up", "pays"):
            table.add_column(f"{where}: {name}", justify="right")
    steps = {where: reports.shown(own) for where, own in report.predicted.items()}
    for one, other in zip(steps[HERE], steps[APART], strict=True):
        cells = [str(one.replicas)]
        for own in (one, other):
            pays = "-" if own.replicas == 1 else "yes" if own.pays else "no"
            cells += [display.duration(own.step), f"{own.ratio:.3g}"]
            cells += [f"{own.speed_up:.2f}", pays]
        table.add_row(*cells)
    return table


def _table(name: str) -> rich.table.Table:
    return rich.table.Table(
        title=name, title_justify="left", caption_justify="left", box=rich.box.SIMPLE
    )
