# SPDX-License-Identifier: Apache-2.0
"""Generates the pages of the reference, one per public name, before Sphinx reads them.

They go to docs/reference/api/, which git ignores. autodoc fills them from docstrings.
"""

from __future__ import annotations

import inspect
import pathlib
import types
from collections.abc import Iterable
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import replicator
from docs._ext import names, programs

_LOG = logging.getLogger(__name__)
_SET_UP = (
    "The examples run as doctests. They assume ``import tensorflow as tf``, "
    '``import replicator`` and ``repl = replicator.Replicator(["CPU:0", "CPU:1"])``.'
)


def pages() -> dict[str, str]:
    """Returns the text of every generated page, by file name."""
    result = {"Replicator.rst": _replicator()}
    for name in names.methods():
        result[f"Replicator.{name}.rst"] = _method(name)
    public_names = names.public()
    full_names = {names.short(full): full for full in public_names}
    for section in names.SECTIONS:
        result[f"{section.slug}.rst"] = _section(section, full_names)
        for name in section.names:
            result[f"{name}.rst"] = _page(name, full_names[name])
    read = [programs.read(name) for name in programs.names()]
    result["programs.rst"] = _programs(read)
    for program in read:
        result[f"{program.short}.rst"] = _program(program)
    return result


def _replicator() -> str:
    lines = [
        *_title("Replicator"),
        *(_SET_UP, "", ".. autoclass:: replicator.Replicator", ""),
        *(_title("Methods and properties", "-")),
    ]
    for heading, own in names.METHODS.items():
        lines += _title(heading, "~")
        lines += _table(
            (f"Replicator.{n}", getattr(replicator.Replicator, n)) for n in own
        )
    files = [
        f"{n} <Replicator.{n}>" for own in names.METHODS.values() for n in own
    ]  # short, for the sidebar
    return _text([*lines, *_toctree(files)])


def _method(name: str) -> str:
    member = inspect.getattr_static(replicator.Replicator, name)
    called = isinstance(member, types.FunctionType | staticmethod)
    kind = "automethod" if called else "autoproperty"
    full = f"replicator.Replicator.{name}"
    return _text([*_title(f"Replicator.{name}"), f".. {kind}:: {full}"])


def _section(section: names.Section, full_names: dict[str, str]) -> str:
    public_names = names.public()
    lines = [*_title(section.title), section.about, ""]
    lines += _table((name, public_names[full_names[name]]) for name in section.names)
    return _text(
        [
            *lines,
            *_toctree(f"{name.rpartition('.')[2]} <{name}>" for name in section.names),
        ]
    )


def _page(name: str, full: str) -> str:
    value = names.public()[full]
    lines = _title(name)
    if not isinstance(value, type):
        return _text([*lines, f".. autofunction:: {full}"])
    lines += [f".. autoclass:: {full}"]
    members = names.members(value)
    if members:
        lines += [f"   :members: {', '.join(members)}"]
    if "__call__" in members:
        lines += ["   :special-members: __call__"]
    return _text(lines)


def _programs(read: Iterable[programs.Program]) -> str:
    found = list(read)
    rows = [(f":doc:`{p.name} <{p.short}>`", p.about.partition("\n")[0]) for p in found]
    about = "Each is run as ``python -m NAME``."
    return _text(
        [
            *_title("Command-line programs"),
            *(about, ""),
            *_list_table(rows),
            *_toctree([p.short for p in found]),
        ]
    )


def _program(program: programs.Program) -> str:
    lines = [*_title(program.name), program.about, ""]
    lines += _title("Flags", "-")
    for flag in program.flags:
        takes = f" {flag.takes}" if flag.takes else ""
        default = f" Default: ``{flag.default}``." if flag.default else ""
        lines += [f"``--{flag.name}{takes}``", f"   {flag.help}{default}", ""]
    return _text(lines)


# --- reStructuredText -----------------------------------------------------------------


def _title(text: str, under: str = "=") -> list[str]:
    return ["", text, under * len(text), ""]


def _table(members: Iterable[tuple[str, Any]]) -> list[str]:
    return _list_table(
        [(f":api:`{name}`", names.first_line(value)) for name, value in members]
    )


def _list_table(rows: Iterable[tuple[str, str]]) -> list[str]:
    lines = [".. list-table::", "   :widths: 30 70", ""]
    for left, right in rows:
        lines += [f"   * - {left}", f"     - {right}"]
    return [*lines, ""]


def _toctree(files: Iterable[str]) -> list[str]:
    """Returns a toctree that puts pages into the sidebar, and shows nothing."""
    return [".. toctree::", "   :hidden:", "", *(f"   {name}" for name in files), ""]


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines).strip() + "\n"


# --- Sphinx hooks ---------------------------------------------------------------------


def _write(app: Sphinx) -> None:
    """Writes the pages; unchanged ones keep their modification time."""
    reference = pathlib.Path(app.srcdir) / "reference"
    folder = reference / "api"
    folder.mkdir(exist_ok=True)
    texts = pages()
    for path in folder.iterdir():
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    missing = names.missing((reference / "errors.md").read_text())
    for problem in [*missing, *names.undocumented()]:
        _LOG.warning(problem, type="reference")


def _outdated(
    app: Sphinx,
    env: BuildEnvironment,
    added: set[str],
    changed: set[str],
    removed: set[str],
) -> list[str]:
    """Makes Sphinx reread pages whose sources it does not track.

    A class's page shows inherited members, and methods wrap functions of other modules.
    """
    own = max(path.stat().st_mtime for path in pathlib.Path(__file__).parent.iterdir())
    shown = max(
        path.stat().st_mtime
        for path in pathlib.Path(replicator.__file__).parent.rglob("*.py")
    )
    return [
        name
        for name in env.found_docs
        if env.all_docs.get(name, 0) / 1e6
        < (max(own, shown) if name.startswith("reference/api/") else own)
    ]


def _sign(
    app: Sphinx,
    what: str,
    name: str,
    value: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Hides the arguments of classes that users never instantiate."""
    full = names.aliases().get(name, name)
    if what == "class" and names.short(full) in names.GIVEN:
        return "", None
    return None


def _fences(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Turns Markdown's fenced code into reStructuredText."""
    converted, inside = [], False
    for line in lines:
        if line.startswith("```"):
            inside = not inside
            converted += [f".. code-block:: {line[3:]}", ""] if inside else [""]
        else:
            converted.append(f"   {line}" if inside else line)
    lines[:] = converted


def _hide_arguments(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Leaves out the arguments of classes that users never instantiate."""
    full = names.aliases().get(name, name)
    if what == "class" and names.short(full) in names.GIVEN and "Args:" in lines:
        start = lines.index("Args:")
        end = lines.index("", start) + 1
        del lines[start:end]


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Node
) -> nodes.Node | None:
    """Resolves a class that is named by its module to its public name."""
    full = names.aliases().get(node.get("reftarget", ""))
    if full is None:
        return None
    return env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, "obj", full, node, content
    )


def _dash(app: Sphinx, tree: nodes.document, name: str) -> None:
    """Puts a dash between an argument and its meaning, where Sphinx has two hyphens."""
    for text in list(tree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("builder-inited", _write)
    app.connect("env-get-outdated", _outdated)
    app.connect("autodoc-process-signature", _sign)
    app.connect("autodoc-process-docstring", _fences, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _hide_arguments, priority=400)
    app.connect("missing-reference", _resolve)
    app.connect("doctree-resolved", _dash)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
