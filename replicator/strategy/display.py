# SPDX-License-Identifier: Apache-2.0
"""Prints a strategy as a table in the terminal, by rich."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from replicator.report.units import duration, size
from replicator.strategy.nodes import Node
from replicator.variables.synchronizer import PSSynchronizer, Synchronizer

_WIDTH = 10_000  # wide: the terminal may wrap it
_MOST_SHOWN = 4  # parts with their placements listed
_HEADER = (
    "variable",
    "shape",
    "bytes",
    "placement",
    "synchronizer",
    "compressor",
    "bytes per step",
    "predicted",
)


def table(strategy: Any) -> str:
    """Formats a strategy as a table with one row per variable, and totals."""
    rows = [_row(node) for node in strategy.nodes]
    sizes = [node.nbytes for node in strategy.nodes if node.nbytes is not None]
    sent = [node.sent for node in strategy.nodes if node.sent is not None]
    seconds = [node.seconds for node in strategy.nodes if node.seconds is not None]
    total = ["all", "", "", "", "", "", "", ""]
    total[2] = size(sum(sizes)) if sizes else ""
    total[6] = size(sum(sent)) if sent else ""
    total[7] = duration(sum(seconds)) if seconds else ""
    title = f"Strategy {strategy.id} for {len(strategy.replicas)} replicas"
    trial_lines = [f"  {trial}" for trial in strategy.trials]
    try:
        return "\n".join([_by_rich(title, rows, total), *trial_lines])
    except ModuleNotFoundError:
        lines = ["\t".join(cells) for cells in (_HEADER, *rows, total)]
        note = "(pip install rich, or 'replicator[plan]', for a table)"
        return "\n".join([title, *lines, note, *trial_lines])


def _by_rich(title: str, rows: Sequence[Sequence[str]], total: Sequence[str]) -> str:
    import rich.box
    import rich.console
    import rich.table

    grid = rich.table.Table(
        title=title, title_justify="left", box=rich.box.SIMPLE, show_footer=True
    )
    right_aligned = ("bytes", "bytes per step", "predicted")
    for name, footer in zip(_HEADER, total, strict=True):
        justify: Any = "right" if name in right_aligned else "left"
        grid.add_column(name, footer, justify=justify, overflow="fold")
    for cells in rows:
        grid.add_row(*cells)
    console = rich.console.Console(
        file=io.StringIO(),
        force_terminal=False,  # plain text, in notebooks, too
        force_jupyter=False,
        width=_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as captured:
        console.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _row(node: Node) -> list[str]:
    """Returns the cells of a variable's row."""
    optional = [part.synchronizer for part in node.parts] or [node.synchronizer]
    synchronizers = [how for how in optional if how is not None]
    placement = _joined([_placement(how) for how in synchronizers])
    if node.parts:
        sizes = ", ".join(map(str, node.sizes[:_MOST_SHOWN]))
        more = ", ..." if len(node.sizes) > _MOST_SHOWN else ""
        extents = f" of {sizes}{more}" if sizes else ""
        placement = (
            f"{len(node.parts)} parts{extents} along axis {node.axis}: {placement}"
        )
    compressors = {str(how.compressor) or "none" for how in synchronizers}
    return [
        node.name,
        "?" if node.shape is None else f"{node.dtype}{list(node.shape)}",
        size(node.nbytes),
        placement,
        ", ".join(dict.fromkeys(map(_synchronizer, synchronizers))),
        ", ".join(sorted(compressors)),
        size(node.sent),
        "?" if node.seconds is None else duration(node.seconds),
    ]


def _joined(texts: Sequence[str]) -> str:
    """Lists the distinct texts of several parts."""
    kinds = list(dict.fromkeys(texts))
    more = len(kinds) - _MOST_SHOWN
    text = ", ".join(kinds[:_MOST_SHOWN])
    return f"{text} and {more} more" if more > 0 else text


def _placement(how: Synchronizer) -> str:
    if not isinstance(how, PSSynchronizer):
        return "mirrored"
    device = how.reduction_destination.removeprefix("/job:localhost/replica:0/task:0/")
    copies = " with copies" if how.local_replication else ""
    return device.removeprefix("device:") + copies


def _synchronizer(how: Synchronizer) -> str:
    if isinstance(how, PSSynchronizer):
        if not how.sync:
            return "PS, asynchronous"
        return f"PS, staleness {how.staleness}" if how.staleness else "PS"
    return f"all-reduce {how.spec}, group {how.group}"
