# SPDX-License-Identifier: Apache-2.0
"""A text table, for the terminal and for a Markdown file."""

from __future__ import annotations

import dataclasses

import rich.console
import rich.table


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, a row of headings, rows of cells, and a caption.

    The first column is aligned left, the others right.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    caption: str = ""

    def markdown(self) -> str:
        """Returns the table as a section of a Markdown file."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [
            "| " + " | ".join(cells) + " |"
            for cells in (self.columns, rule, *self.rows)
        ]
        parts = [f"## {self.title}", self.caption, "\n".join(lines)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def show(self) -> None:
        """Prints the table."""
        rich_table = rich.table.Table(title=self.title, caption=self.caption)
        for place, column in enumerate(self.columns):
            rich_table.add_column(column, justify="right" if place else "left")
        for row in self.rows:
            rich_table.add_row(*row)
        # Wide enough for a log file too, whose width is unknown.
        console = rich.console.Console()
        rich.console.Console(width=max(160, console.width)).print(rich_table)


def milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds with about three significant digits."""
    value = seconds * 1e3
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def time(seconds: float) -> str:
    """Returns a time in microseconds or milliseconds."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def size(nbytes: float) -> str:
    """Returns a number of bytes in a suitable unit."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    digits = 0 if nbytes >= 100 or nbytes % 1 == 0 else 1
    return f"{nbytes:.{digits}f} {units[0]}"
