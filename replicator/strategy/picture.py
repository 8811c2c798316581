# SPDX-License-Identifier: Apache-2.0
"""Plots a strategy by matplotlib: devices are columns, variables blocks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from replicator.report.units import size
from replicator.strategy.nodes import Node
from replicator.variables.synchronizer import AllReduceSynchronizer, PSSynchronizer

_COLUMN, _HEIGHT = 2.2, 4.5  # inches
_LEAST_NAMED = 0.05  # share of the height below which a block has no room for a name
_MOST_CHARACTERS = 24
_COLORS = {"on one device": "#9ec5e8", "a part": "#f4c58a", "on all": "#cfe3c0"}


@dataclasses.dataclass(frozen=True)
class Block:
    """One device's piece of a variable.

    Attributes:
        device: The device, by its short name.
        name: The variable's path, or the part's.
        nbytes: The piece's size.
        kind: One of _COLORS.
    """

    device: str
    name: str
    nbytes: int
    kind: str


def blocks(strategy: Any) -> list[Block]:
    """Returns each device's piece of each variable of a strategy.

    Variables of unknown size count as 0 bytes.
    """
    pieces = []
    for node in strategy.nodes:
        for part, nbytes, kind in _pieces(node):
            for device in _devices(part, strategy.replicas):
                pieces.append(Block(_short(device), part.name, nbytes, kind))
    return pieces


def _pieces(node: Node) -> Iterator[tuple[Node, int, str]]:
    """Yields each placed node, with its bytes and its kind."""
    whole = node.nbytes or 0
    if node.axis is None:
        on_all = isinstance(node.synchronizer, AllReduceSynchronizer)
        yield node, whole, "on all" if on_all else "on one device"
        return
    extent = 1 if node.shape is None else node.shape[node.axis]
    sizes = node.sizes if node.shape is None else node.extents(extent)
    for part, part_size in zip(node.parts, sizes or [0] * len(node.parts), strict=True):
        yield part, whole * part_size // max(extent, 1), "a part"


def _devices(node: Node, replicas: Sequence[str]) -> Sequence[str]:
    how = node.synchronizer
    if isinstance(how, PSSynchronizer) and not how.local_replication:
        return [how.reduction_destination]
    return replicas


def _short(device: str) -> str:
    head, _, local = device.rpartition("/device:")
    host = head.replace("/replica:0", "").replace("/job:", "").replace("/task", "")
    return local if not host or host.startswith("localhost") else f"{host} {local}"


def draw(strategy: Any, path: str | os.PathLike[str]) -> None:
    """Draws a strategy to a file.

    Args:
        strategy: The Strategy.
        path: A file name that ends in .png or .svg.
    """
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # keeps text as text
        make_figure(strategy).savefig(path, facecolor="white")


def make_figure(strategy: Any) -> Figure:
    """Returns the figure of a strategy."""
    pieces = blocks(strategy)
    names = dict.fromkeys(
        [*map(_short, strategy.replicas), *(b.device for b in pieces)]
    )
    loads = dict.fromkeys(names, 0)
    for block in pieces:
        loads[block.device] += block.nbytes
    largest = max(loads.values(), default=0) or 1
    figure = Figure((_COLUMN * max(len(names), 2) + 1.0, _HEIGHT + 1.2))
    axes = figure.add_subplot()
    axes.set_title(f"Strategy {strategy.id}", loc="left", fontsize=10)
    axes.set_xlim(-0.5, max(len(names), 1) - 0.5)
    axes.set_ylim(0, 1.08)
    axes.set_yticks([])
    axes.set_xticks(range(len(names)))
    axes.set_xticklabels([f"{name}\n{size(loads[name])}" for name in names])
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    columns, tops = {name: k for k, name in enumerate(names)}, dict.fromkeys(names, 0.0)
    for block in pieces:
        height = block.nbytes / largest
        column, bottom = columns[block.device], tops[block.device]
        tops[block.device] += height
        axes.add_patch(
            Rectangle(
                (column - 0.4, bottom),
                0.8,
                height,
                facecolor=_COLORS[block.kind],
                edgecolor="white",
            )
        )
        if height >= _LEAST_NAMED:
            text = block.name[-_MOST_CHARACTERS:]
            axes.text(
                column,
                bottom + height / 2,
                f"{text}\n{size(block.nbytes)}",
                ha="center",
                va="center",
                fontsize=7,
            )
    kinds = dict.fromkeys(block.kind for block in pieces)
    handles = [Patch(color=_COLORS[kind], label=kind) for kind in kinds]
    if handles:
        figure.legend(handles=handles, loc="lower center", ncols=3, fontsize=8)
    figure.subplots_adjust(bottom=0.2)
    return figure
