# SPDX-License-Identifier: Apache-2.0
"""Draws the sketch of a graph: devices are columns, scopes are blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from replicator.stages.sketch import COMMUNICATE, Block, Sketch

_COLUMN, _ROW = 2.6, 0.42  # inches
_MARGIN = 0.5
_MOST_ROWS = 60
_MOST_CHARACTERS = 26
_PLAIN, _CALLS = "#dbe7f5", "#f6cf9c"


def draw(sketch: Sketch, title: str, path: str | os.PathLike[str]) -> None:
    """Draws the sketch of a graph to a file.

    Args:
        sketch: The sketch.
        title: The title above it.
        path: A file name that ends in .svg or .png.
    """
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        make_figure(sketch, title).savefig(path, facecolor="white")


def make_figure(sketch: Sketch, title: str) -> Figure:
    """Returns the picture of a sketch."""
    devices = sketch.devices or ("no ops",)
    columns = {device: k for k, device in enumerate(devices)}
    places, rows = _places(sketch.blocks, columns)
    width = _COLUMN * len(devices) + _MARGIN
    height = _ROW * (rows + 2) + _MARGIN
    figure = Figure((width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.text(_MARGIN / 2, 0.3, title, fontsize=11, va="center")
    for device, k in columns.items():
        axes.text(_left_edge(k), 0.75, device, fontsize=9, weight="bold", va="center")
    for block, place in zip(sketch.blocks, places, strict=True):
        if place is not None:
            _draw_block(axes, block, *place)
    for begin, end, count in sketch.links:
        if places[begin] is not None and places[end] is not None:
            _draw_link(axes, places[begin], places[end], count)
    return figure


Place = tuple[int, int]  # column and row


def _places(
    blocks: Sequence[Block], columns: dict[str, int]
) -> tuple[list[Place | None], int]:
    """Returns the place of each block, if there is room, and the number of rows."""
    used = dict.fromkeys(columns, 0)
    places: list[Place | None] = []
    for block in blocks:
        row = used[block.device]
        used[block.device] += 1
        places.append((columns[block.device], row) if row < _MOST_ROWS else None)
    return places, min(max(used.values(), default=0), _MOST_ROWS)


def _left_edge(column: int) -> float:
    return _MARGIN / 2 + column * _COLUMN


def _top_edge(row: int) -> float:
    return 1.0 + row * _ROW


def _draw_block(axes: Axes, block: Block, column: int, row: int) -> None:
    communicates = block.calls or block.scope == COMMUNICATE
    color = _CALLS if communicates else _PLAIN
    axes.add_patch(
        FancyBboxPatch(
            (_left_edge(column) + 0.05, _top_edge(row) + 0.05),
            _COLUMN - 0.7,
            _ROW - 0.12,
            boxstyle="round,pad=0.02",
            facecolor=color,
            edgecolor="#7a8794",
            linewidth=0.6,
        )
    )
    text = block.scope[:_MOST_CHARACTERS]
    more = f", {block.calls} calls" if block.calls else ""
    axes.text(
        _left_edge(column) + 0.1,
        _top_edge(row) + _ROW / 2,
        f"{text} ({block.ops} ops{more})",
        fontsize=7,
        va="center",
    )


def _draw_link(axes: Axes, begin: Place | None, end: Place | None, count: int) -> None:
    assert begin is not None and end is not None
    right = end[0] > begin[0]
    edge = _COLUMN - 0.63
    axes.annotate(
        "",
        (_left_edge(end[0]) + (0.03 if right else edge), _top_edge(end[1]) + _ROW / 2),
        (
            _left_edge(begin[0]) + (edge if right else 0.03),
            _top_edge(begin[1]) + _ROW / 2,
        ),
        arrowprops={
            "arrowstyle": "->",
            "color": "#b0552b",
            "linewidth": min(0.4 + 0.2 * count, 2.0),
            "alpha": 0.6,
        },
    )
