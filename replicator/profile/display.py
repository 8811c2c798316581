# SPDX-License-Identifier: Apache-2.0
"""A report as tables in the terminal, by rich."""

from __future__ import annotations

from typing import TextIO

import rich.box
import rich.console
import rich.table

from replicator.profile import report as reports
from replicator.profile.report import ON_THESE_DEVICES, Report
from replicator.report import display, units

_WIDTH = 120  # characters, if standard output is no terminal


def show(report: Report, file: TextIO | None = None) -> None:
    """Prints a report.

    Args:
        report: What to print.
        file: The text file to print to; standard output by default.
    """
    console = display.new_console(_WIDTH, file)
    console.print(_parts(report))
    if not report.predicted:
        console.print(
            "Nothing is predicted for other numbers of replicas, since the program "
            f"fails with one: {report.measured.needs_all}"
        )
        return
    for where in report.predicted:
        console.print(_predicted(report, where))
        text = report.verdict(where)
        console.print(text[0].upper() + text[1:] + "\n")
    console.print(
        "T_comp is the time of a step of one replica alone, T_sync the additional time "
        "of a step of R; each keeps its batch, so it pays while T_sync / T_comp < "
        "R - 1 (Das 2018). An epoch, which then has 1 / R as many steps, is shown in "
        "percent of one replica's. A step takes between the time with the most overlap "
        "and that with the least, widened by how much steps vary."
    )


def _parts(report: Report) -> rich.table.Table:
    measured = report.measured
    count = measured.replicas
    on = "" if measured.cores is None else f", which share {measured.cores} cores"
    by = f" under {report.strategy}" if report.strategy else ""
    table = display.new_table(f"A step of {report.name}{by} on {count} replicas{on}")
    table.add_column("part")
    table.add_column("takes", justify="right")
    table.add_column("of the step", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("line", overflow="fold")

    def add(name: str, seconds: float, *cells: str) -> None:
        share = f"{seconds / measured.step:.1%}"
        table.add_row(name, units.duration(seconds), share, *cells)

    add("the call", measured.fixed)
    add("computing", measured.compute)
    if measured.once:
        add("computing by one for all", measured.once)
    for row, seconds in zip(measured.rows, measured.communication, strict=True):
        lines = "\n".join(display.lines(row))
        add(display.title(row), seconds, units.size(row.nbytes), lines)
    add("a step", measured.step)
    if not measured.needs_all:
        add("a step of one replica alone", measured.alone)
    return table


def _predicted(report: Report, where: str) -> rich.table.Table:
    table = display.new_table(f"Predicted {report.title(where)}")
    table.caption = _source(report, where)
    names = ("replicas", "step", "between", "T_sync / T_comp", "speed-up", "epoch")
    for name in (*names, "pays"):
        table.add_column(name, justify="right")
    for prediction in reports.powers_of_two(report.predicted[where]):
        table.add_row(
            str(prediction.replicas),
            units.duration(prediction.step),
            " - ".join(map(units.duration, (prediction.low, prediction.high))),
            f"{prediction.ratio:.3g}",
            f"{prediction.speed_up:.2f}",
            f"{1 / prediction.speed_up:.0%}",
            "-" if prediction.replicas == 1 else "yes" if prediction.pays else "no",
        )
    return table


def _source(report: Report, where: str) -> str:
    """Names the rates that predictions use, besides the measurement."""
    if where == ON_THESE_DEVICES:
        return f"Rates of devices: {report.source}."
    network = report.network
    speed = f"{8e-9 / network.link:.3g} Gbit/s" if network.link else "any bandwidth"
    latency = f"{network.message * 1e6:.3g} us per message"
    return f"One replica each, {speed}, {latency}; see --bandwidth and --latency."
