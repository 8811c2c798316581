# SPDX-License-Identifier: Apache-2.0
"""Tables of "you wrote, you write" whose right side is run before it is shown."""

from __future__ import annotations

import itertools
import linecache
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from IPython.display import Markdown

_HEAD = ["| you wrote | you write | |", "|---|---|---|"]

_numbers = itertools.count()


def in_step(repl: Any, before: str = "", **names: Any) -> Callable[[str], None]:
    """Returns what runs a snippet as a step_fn.

    Args:
        repl: A Replicator.
        before: Lines that come before the snippet, in step_fn.
        **names: What else the snippet may use.
    """

    def run(code: str) -> None:
        body = textwrap.indent(f"{before}\n{code}\nreturn None", "    ")
        source = f"def step_fn():\n{body}\n"
        name = f"snippet_{next(_numbers)}.py"
        # By which AutoGraph finds the source, as it does that of a cell.
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        made: dict[str, Any] = {"__name__": "snippet", "repl": repl, "tf": tf, **names}
        exec(compile(source, name, "exec"), made)
        repl.run(made["step_fn"])

    return run


def checked(
    rows: Sequence[tuple[str, str, str]], run: Callable[[str], object]
) -> Markdown:
    """Returns a table, after each snippet of its right side has been run.

    Args:
        rows: What one wrote elsewhere, what one writes here, and a remark. Snippets may
            have several lines; "" is shown as a dash.
        run: Runs one snippet.

    Raises:
        RuntimeError: A snippet fails: the table would be wrong.
    """
    logging.set_verbosity(logging.ERROR)  # each snippet is a new step_fn, on purpose
    lines = list(_HEAD)
    for wrote, write, remark in rows:
        if write:
            try:
                run(write)
            except Exception as error:
                raise RuntimeError(f"does not run: {write}") from error
        lines.append(f"| {_shown(wrote)} | {_shown(write)} | {remark} |")
    return Markdown("\n".join(lines))


def _shown(code: str) -> str:
    """Returns code as the cell of a table; spaces that indent stay."""
    cells = []
    for line in code.splitlines():
        indent = len(line) - len(line.lstrip())
        text = line.strip().replace("|", "\\|")
        cells.append("\N{NO-BREAK SPACE}" * indent + f"`{text}`")
    return "<br>".join(cells) or "\N{EM DASH}"
