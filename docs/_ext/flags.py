# SPDX-License-Identifier: Apache-2.0
"""Lists the flags of a program of examples/ in its page.

The directive `flags` takes the program's name. It reads the program, so the page cannot
go stale.
"""

from __future__ import annotations

import os
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from docs._ext import programs


def text(program: programs.Program) -> str:
    """Returns a definition list of a program's flags, in Markdown."""
    lines = []
    for flag in program.flags:
        takes = f" {flag.takes}" if flag.takes else ""
        default = f" Default: `{flag.default}`." if flag.default else ""
        lines += [f"`--{flag.name}{takes}`", f": {flag.help}{default}", ""]
    return "\n".join(lines)


class Flags(SphinxDirective):
    """The flags of the program that is its argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the list."""
        (name,) = self.arguments
        for file in (f"{name}.py", "support/program.py"):  # the latter is shared
            self.env.note_dependency(os.fspath(programs.EXAMPLES / file))
        return self.parse_text_to_nodes(text(programs.read_example(name)))


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("flags", Flags)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
