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
    """Returns a function that runs a snippet as a step_fn.

    Args:
        repl: A Replicator.
        before: Lines that precede the snippet in step_fn.
        **names: Other names that the snippet may use.
    """

    def run(code: str) -> None:
        body = textwrap.indent(f"{before}\n{code}\nreturn None", "    ")
        source = f"def step_fn():\n{body}\n"
        name = f"snippet_{next(_numbers)}.py"
        # Lets AutoGraph find the source, as it does for a cell.
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        namespace: dict[str, Any] = {
            "__name__": "snippet",
            "repl": repl,
            "tf": tf,
            **names,
        }
        exec(compile(source, name, "exec"), namespace)
        repl.run(namespace["step_fn"])

    return run


def checked(
    rows: Sequence[tuple[str, str, str]], run: Callable[[str], object]
) -> Markdown:
    """Returns a table, after running each snippet of its right side.

    Args:
        rows: The code elsewhere, the code here, and a remark. Snippets may have several
            lines; "" is shown as a dash.
        run: Runs one snippet.

    Raises:
        RuntimeError: A snippet fails, so the table would be wrong.
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
    """Returns code as a table cell; indentation is preserved."""
    cells = []
    for line in code.splitlines():
        indent = len(line) - len(line.lstrip())
        text = line.strip().replace("|", "\\|")
        cells.append("\N{NO-BREAK SPACE}" * indent + f"`{text}`")
    return "<br>".join(cells) or "\N{EM DASH}"
