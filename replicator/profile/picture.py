# SPDX-License-Identifier: Apache-2.0
"""A report as a picture, by matplotlib: parts of a step, and speed-ups."""

from __future__ import annotations

import os
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replicator.profile.report import Report
from replicator.report import display

_MOST_PARTS = 12  # the longest communications, which have their own bars
_SIZE = (11.0, 4.5)  # inches


def plot(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws a report.

    Args:
        report: What to draw.
        path: The picture file, .png or .svg.
    """
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        if report.predicted:
            left, right = figure.subplots(1, 2)
            _speed_ups(right, report)
        else:
            left = figure.subplots()
        _parts(left, report)
        figure.savefig(path)


def _parts(axes: Axes, report: Report) -> None:
    measured = report.measured
    rows = sorted(
        zip(measured.communication, measured.rows, strict=True),
        key=lambda pair: -pair[0],
    )
    bars = [
        ("the call", measured.fixed),
        ("computing", measured.compute),
        ("computing by one for all", measured.once),
    ]
    bars += [
        (f"{display.title(row)}\n{_short(display.lines(row))}", seconds)
        for seconds, row in rows[:_MOST_PARTS]
    ]
    more = sum(seconds for seconds, _ in rows[_MOST_PARTS:])
    if more:
        bars.append((f"{len(rows) - _MOST_PARTS} more", more))
    names, times = zip(*bars, strict=True)
    places = range(len(bars))
    colors = ["tab:gray", *["tab:blue"] * 2, *["tab:orange"] * (len(bars) - 3)]
    axes.barh(places, [1e3 * seconds for seconds in times], color=colors)
    axes.set_yticks(places, names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step")
    axes.set_title(f"{report.name}, {measured.replicas} replicas", fontsize=9)


def _speed_ups(axes: Axes, report: Report) -> None:
    for where, steps in report.predicted.items():
        numbers = [prediction.replicas for prediction in steps]
        ups = [prediction.speed_up for prediction in steps]
        axes.plot(numbers, ups, label=report.title(where))
        least = [
            prediction.replicas * prediction.alone / prediction.high
            for prediction in steps
        ]
        most = [
            prediction.replicas * prediction.alone / prediction.low
            for prediction in steps
        ]
        axes.fill_between(numbers, least, most, alpha=0.2)
    axes.plot(numbers, numbers, color="tab:gray", linestyle=":", label="no waiting")
    axes.axhline(1.0, color="tab:red", linewidth=0.8, label="one replica alone")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("replicas")
    axes.set_ylabel("speed-up")
    axes.legend(fontsize=7)
    axes.set_title("predicted", fontsize=9)


def _short(lines: Sequence[str]) -> str:
    """Returns the user's lines without their directories."""
    return ", ".join(os.path.basename(line) for line in lines)
