# SPDX-License-Identifier: Apache-2.0
"""A plan as a picture, by matplotlib: replicas are lanes, communications are links.

Communications are drawn from left to right in build order, above their numbers in the
table; long plans continue in further strips. Sizes are in inches, so that a picture
stays readable whatever its contents.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from replicator.report.display import title
from replicator.report.rows import Row, Rows
from replicator.report.units import size

_LANE = 0.45  # distance between lanes
_STEP = 0.45  # largest distance between communications
_WIDTH = 18.0  # largest width of a strip, without lane names
_LEAST_WIDTH = 6.0
_LEFT = 1.2  # for lane names
_MOST_IN_STRIP = 64
_TOP = 0.55  # for the heading
_LEGEND_ENTRY = (1.5, 0.22)
_CHARACTER = 0.06  # width of one at _FONT_SIZE
_FONT_SIZE = 7.5
_MOST_CHARACTERS = 60
_DPI = 110


Color = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class _Run:
    """Adjacent communications at the same place in the control flow, by number."""

    first: int
    last: int
    text: str


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The layout of a picture, in inches.

    Attributes:
        strips: The numbers of the communications in each strip.
        step: The distance between communications.
        width: The width of a strip, without lane names.
        above: The space above the lanes, for the titles of communications.
        lanes: The number of replicas.
        below: The space below the lanes, for numbers and places.
        head: The space above the strips, for the heading and the legend.
        columns: The number of columns of the legend.
    """

    strips: tuple[range, ...]
    step: float
    width: float
    above: float
    lanes: int
    below: float
    head: float
    columns: int

    @property
    def strip_height(self) -> float:
        """The height of a strip."""
        return self.above + self.lanes * _LANE + self.below

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the figure."""
        height = self.head + len(self.strips) * self.strip_height
        return _LEFT + self.width + 0.1, height


def draw(plan: Rows, path: str | os.PathLike[str]) -> None:
    """Draws a plan.

    Args:
        plan: What to draw.
        path: A file name that ends in .png or .svg.
    """
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        make_figure(plan).savefig(path, dpi=_DPI, facecolor="white")


def make_figure(plan: Rows) -> Figure:
    """Returns the picture of a plan."""
    legend = list(_legend(plan))
    layout = _layout(plan, len(legend))
    width, height = layout.size
    figure = Figure(layout.size)
    for n, numbers in enumerate(layout.strips):
        bottom = height - layout.head - (n + 1) * layout.strip_height
        axes = figure.add_axes(
            (
                _LEFT / width,
                bottom / height,
                layout.width / width,
                layout.strip_height / height,
            )
        )
        _draw_strip(axes, plan, numbers, layout)
    figure.text(0.1 / width, 1 - 0.1 / height, _heading(plan), va="top", size=11)
    figure.legend(
        handles=legend,
        loc="upper left",
        bbox_to_anchor=(0, 1 - _TOP / height),
        ncols=layout.columns,
        handlelength=3,
        frameon=False,
        fontsize=_FONT_SIZE + 1,
    )
    return figure


def _layout(plan: Rows, entries: int) -> _Layout:
    """Computes the layout for a legend with `entries` entries."""
    count = max(len(plan), 1)
    per_strip = math.ceil(count / math.ceil(count / _MOST_IN_STRIP))
    step = min(_WIDTH / per_strip, _STEP)
    width = max(per_strip * step, _LEAST_WIDTH)
    columns = int((_LEFT + width) / _LEGEND_ENTRY[0])
    numbers = range(len(plan))
    return _Layout(
        strips=tuple(
            numbers[start : start + per_strip] for start in range(0, count, per_strip)
        ),
        step=step,
        width=width,
        above=_length(_label(row) for row in plan) + 0.3,
        lanes=len(plan.devices),
        below=_length(run.text for run in _runs(plan, numbers)) + 0.4,
        head=_TOP + math.ceil(entries / columns) * _LEGEND_ENTRY[1],
        columns=columns,
    )


def _draw_strip(
    axes: Axes, plan: Rows, numbers: Sequence[int], layout: _Layout
) -> None:
    """Draws one strip of communications: x is their number, y the replica."""
    lanes = layout.lanes
    left = (numbers[0] if numbers else 0) - 0.7
    axes.set_axis_off()
    axes.set_xlim(left, left + layout.width / layout.step)
    axes.set_ylim(lanes - 0.5 + layout.below / _LANE, -0.5 - layout.above / _LANE)
    for run in _runs(plan, numbers):
        ends = [run.first - 0.45, run.last + 0.45]
        axes.fill_between(ends, -0.5, lanes - 0.5, color="0.94", lw=0)
        _write(axes, (run.first + run.last) / 2, lanes + 0.1, run.text)
    _draw_lanes(axes, plan.devices)
    colors = _colors(plan)
    for number in numbers:
        row = plan[number]
        _draw_row(axes, number, row, colors[row.primitive])
        _write(axes, number, -0.55, _label(row), va="bottom")
        _write(axes, number, lanes - 0.4, str(number), rotation=0, color="grey")


def _heading(plan: Rows) -> str:
    totals = plan.totals
    several = "s" if len(plan) != 1 else ""
    text = f"{len(plan)} communication{several} of {len(plan.devices)} replicas"
    if totals.per_step.nbytes:
        text += f", {size(totals.per_step.nbytes)} per step"
    if totals.per_turn.nbytes:
        more = size(totals.per_turn.nbytes)
        text += f"\n{more} each time in conditionals and loops of unknown length"
    return text


def _label(row: Row) -> str:
    return _shortened(f"{title(row)}, {size(row.nbytes)}")


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _length(texts: Iterable[str]) -> float:
    """Returns the height of the longest text, written vertically."""
    return _CHARACTER * max(map(len, texts), default=0)


def _runs(plan: Rows, numbers: Sequence[int]) -> list[_Run]:
    """Returns the runs of adjacent communications, except at the top level."""
    runs = []
    places = itertools.groupby(numbers, lambda n: (plan[n].path, plan[n].times))
    for (path, times), group in places:
        neighbours = list(group)
        often = "" if times in (1, None) else f" ({times} times)"
        if path:
            runs.append(
                _Run(
                    neighbours[0], neighbours[-1], _shortened(" > ".join(path)) + often
                )
            )
    return runs


def _colors(plan: Rows) -> dict[str, Color]:
    names = sorted({row.primitive for row in plan})
    palette = matplotlib.colormaps["tab10" if len(names) <= 10 else "tab20"]
    return {name: palette(n) for n, name in enumerate(names)}


def _draw_lanes(axes: Axes, devices: Sequence[str]) -> None:
    left, right = axes.get_xlim()
    for replica_id, device in enumerate(devices):
        axes.plot([left, right], [replica_id] * 2, color="0.75", lw=1, zorder=1)
        name = f"replica {replica_id}, {device.rpartition('device:')[2]}"
        axes.annotate(
            name,
            (left, replica_id),
            (-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            size=_FONT_SIZE,
        )


def _draw_row(axes: Axes, number: int, row: Row, color: Color) -> None:
    """Draws a link between the participants; senders have filled markers."""
    ends = [min(row.group), max(row.group)]
    axes.plot([number] * 2, ends, color=color, lw=1.5, ls=_dashes(row.backward))
    sources = {link.source for link in row.links}
    receivers = {link.destination for link in row.links} - sources
    for face, replica_ids in (
        (color, [r for r in row.group if r not in receivers]),
        ("white", [r for r in row.group if r in receivers]),
    ):
        axes.scatter(
            [number] * len(replica_ids),
            replica_ids,
            s=30,
            marker=_marker(row.backward),
            facecolor=[face],
            edgecolor=[color],
            linewidth=1.5,
            zorder=3,
        )


def _write(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    rotation: int = 90,
    va: str = "top",
    color: str = "black",
) -> None:
    axes.text(
        x,
        y,
        text,
        rotation=rotation,
        va=va,
        ha="center",
        size=_FONT_SIZE,
        color=color,
        parse_math=False,
    )


def _legend(plan: Rows) -> Iterator[Line2D]:
    """Yields a legend entry per primitive and per style of link."""
    for name, color in _colors(plan).items():
        yield Line2D([], [], color=color, lw=4, label=name)
    for backward, name in ((False, "forward"), (True, "backward")):
        yield Line2D(
            [],
            [],
            color="black",
            lw=1.5,
            ls=_dashes(backward),
            marker=_marker(backward),
            label=name,
        )
    yield Line2D(
        [], [], color="black", lw=0, marker="o", mfc="white", label="receives only"
    )


def _dashes(backward: bool) -> str:
    return "--" if backward else "-"


def _marker(backward: bool) -> str:
    return "s" if backward else "o"
