# SPDX-License-Identifier: Apache-2.0
"""What pages say of the library and its programs is so, and nothing is left out."""

from __future__ import annotations

import ast
import pathlib
import re
import runpy
from collections.abc import Iterator

import pytest
import tensorflow as tf

from docs._ext import names, programs
from docs.helpers import passes

_ROOT = programs.EXAMPLES.parent
_DOCS = _ROOT / "docs"
_FENCES = re.compile(r"^(```+)(?!`).*?^\1$", re.M | re.S)
_COMMENTS = re.compile(r"^<!-- .*?-->$", re.M | re.S)
_MARKUP = re.compile(r"\{\w+\}`|\{\{|^---$|^\(.*\)=$|^:::|:tags:", re.M)


def test_pages_show_no_markup_of_the_site_on_github() -> None:
    for path in sorted(_DOCS.rglob("*.md")):
        text = _COMMENTS.sub("", path.read_text())
        assert not re.search(r"^```+\{", text, re.M), path.name
        assert not _MARKUP.search(_FENCES.sub("", text)), path.name


def test_every_guide_is_in_the_sidebar_and_in_the_list_of_guides() -> None:
    index = (_DOCS / "index.md").read_text()
    listed = (_DOCS / "guides" / "index.md").read_text()
    for path in sorted((_DOCS / "guides").glob("*.md")):
        assert f"\nguides/{path.stem}\n" in index, path.name
        assert path.stem == "index" or f"]({path.name})" in listed, path.name


def test_each_pass_is_drawn_or_named_as_one_that_changes_nothing() -> None:
    text = (_DOCS / "internals" / "passes.md").read_text()
    drawings, _, unchanging = text.partition("## Passes that change no graph")
    drawn = set(re.findall(r'^passes\.show\(\w+, "(\w+)"\)', drawings, re.M))
    named = set(re.findall(r"^- `(\w+)`", unchanging, re.M))
    assert drawn | named == passes.functions().keys()
    assert not drawn & named


def test_the_programs_of_the_front_page_are_warned_of_nothing(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = (_DOCS / "index.md").read_text()
    found = re.findall("```py\n(.*?)```", text, re.DOTALL)
    assert len(found) == 2
    program = "\n".join(found).replace("GPU:", "CPU:").replace("10_000", "3")
    x = tf.random.stateless_normal([7, 3], seed=[1, 2])
    given = {
        "tf": tf,
        "x": x,
        "y": x[:, :1],
        "make_model": lambda: tf.keras.Sequential([tf.keras.layers.Dense(1)]),
        "loss_fn": tf.keras.losses.MeanSquaredError(),
        "dataset": tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(5).repeat(),
    }
    path = tmp_path / "front_page.py"
    path.write_text(program)
    assert float(runpy.run_path(str(path), given)["loss"]) > 0
    assert not caplog.text


# --- Every primitive has a picture ----------------------------------------------------

_TOPICS = ("Collectives", "Messages", "Python objects", "Methods of TF-Replicator")
_CELL = re.compile(r"^```python$(.*?)^```$", re.M | re.S)
_CALL = re.compile(r"\brepl\.(\w+)")


def _drawn(page: str) -> set[str]:
    """Returns the methods called in cells that draw a picture."""
    cells = [cell for cell in _CELL.findall(page) if "picture(" in cell]
    return {name for cell in cells for name in _CALL.findall(cell)}


def _borrowed(page: str) -> dict[str, str]:
    """Returns the methods that have another's picture, and the method whose it is."""
    table = page.partition("## Calls with the picture of another\n")[2]
    rows = [line.split("|") for line in table.partition("\n## ")[0].splitlines()]
    pairs = [
        (_CALL.findall(row[1]), _CALL.findall(row[2])) for row in rows[3:] if row[1:]
    ]
    return {name: whose for calls, (whose,) in pairs for name in calls}


def test_every_primitive_has_a_picture_or_says_whose() -> None:
    page = (_DOCS / "guides" / "communication.md").read_text()
    listed = {name for topic in _TOPICS for name in names.METHODS[topic]}
    drawn, borrowed = _drawn(page), _borrowed(page)
    assert listed - drawn - set(borrowed) == set()
    assert set(borrowed.values()) <= drawn
    assert not set(borrowed) & drawn


# --- The messages of the page of errors are messages of the library -------------------

_MESSAGE = re.compile(r"^\| \*([^*]+)\*", re.MULTILINE)
# What differs from one message to the next.
_VALUE = re.compile(r"\.\.\.|\d+|'[^']*'|\w+(?==)|\w+\[.*?\]")


def _texts() -> Iterator[str]:
    """Yields the texts in the library's code; f-strings have no values."""
    for path in (_ROOT / "replicator").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in node.values]
                yield "\0".join(p for p in parts if isinstance(p, str))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_every_message_of_the_page_of_errors_is_in_the_library() -> None:
    page = (_DOCS / "reference" / "errors.md").read_text()
    messages = [*_MESSAGE.findall(page), "was never said of 3 replicas"]
    texts = "\n".join(_texts())
    assert len(messages) > 50
    assert [
        message
        for message in messages
        if any(part.strip(" ,'=") not in texts for part in _VALUE.split(message))
    ] == messages[-1:]


# --- Every program of examples/ has a page, with its command and its flags ------------

_LIST = re.compile(r"^EXAMPLES := ((?:.*\\\n)*.*)$", re.MULTILINE)
_TARGETS = {
    name.replace("-", "_"): f"make {name}"
    for name in _LIST.findall((_ROOT / "Makefile").read_text())[0].split()
    if name != "\\"
}
# The actors are started by the learner, and on its page.
_NAMES = [name for name in programs.examples() if name != "actors"]
_SHOWN = re.compile(r"^<!-- of (\S+) -->\n\n```\w+\n(.*?)\n```$", re.M | re.S)


def _page(name: str) -> str:
    return (_DOCS / "programs" / f"{name}.md").read_text()


def test_every_page_is_about_a_program() -> None:
    pages = {path.stem for path in (_DOCS / "programs").glob("*.md")}
    assert pages == {*_NAMES, "index", "minimal"}
    assert _TARGETS["tensor_parallel"] == "make tensor-parallel"
    assert _TARGETS.keys() < set(_NAMES)


@pytest.mark.parametrize("name", _NAMES)
def test_every_program_has_a_page(name: str) -> None:
    page, index = _page(name), _page("index")
    assert f"examples/{name}.py" in page
    assert f"\n```{{flags}} {name}\n" in page
    assert f"]({name}.md) | `" in index
    if name in _TARGETS:
        assert f"\n{_TARGETS[name]}\n" in page
        assert f"| `{_TARGETS[name]}` |" in index


@pytest.mark.parametrize("name", [*_NAMES, "index", "minimal"])
def test_what_a_page_shows_of_a_program_is_in_the_program(name: str) -> None:
    found = _SHOWN.findall(_page(name))
    assert len(found) == _page(name).count("<!-- of ")
    for path, code in found:  # however far it is indented
        shown, text = ("".join(x.split()) for x in (code, (_ROOT / path).read_text()))
        assert shown in text, code


@pytest.mark.parametrize("path", sorted((programs.EXAMPLES / "minimal").glob("*.py")))
def test_a_short_program_is_short(path: pathlib.Path) -> None:
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert sum(line != "" and not line.startswith("#") for line in lines) <= 60
