# SPDX-License-Identifier: Apache-2.0
"""Every public name has a page in the reference; checked without running Sphinx."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

import replicator
from docs._ext import flags, names, programs

_ERRORS = pathlib.Path(names.__file__).parents[1] / "reference" / "errors.md"


def test_every_public_name_has_one_page_and_every_member_a_docstring() -> None:
    assert names.missing(_ERRORS.read_text()) == []
    assert names.undocumented() == []


def test_what_has_no_page_or_no_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator, "__all__", [*replicator.__all__, "world"])
    monkeypatch.setattr(replicator, "world", names.first_line, raising=False)
    monkeypatch.setattr(replicator.Replicator, "gossip", lambda self: 1, raising=False)
    more = {"Messages": ("send", "recv", "linked", "whisper", "run")}
    monkeypatch.setattr(names, "METHODS", {**names.METHODS, **more})
    assert names.missing(_ERRORS.read_text().replace("\n## InputError", "\n##")) == [
        "world is public and has no page: list it in docs/_ext/names.py",
        "Replicator.gossip is public and has no page: list it in docs/_ext/names.py",
        "Replicator.whisper has a page and is not public",
        "Replicator.run has two pages",
        "InputError has no section in reference/errors.md",
    ]


def test_what_has_no_docstring_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator.Replicator.run, "__doc__", None)
    monkeypatch.setattr(replicator.plan.Row, "place", property(_nothing))
    monkeypatch.setattr(replicator.plan.Wire, "__doc__", "Wire(source: int)")
    monkeypatch.setattr(replicator, "connect", _nothing)
    problems = names.undocumented()
    assert {problem.partition(" ")[0] for problem in problems} == {
        *("Replicator.run", "plan.Row.place", "connect", "plan.Wire"),
        *(f"plan.Wire.{f.name}" for f in dataclasses.fields(replicator.plan.Wire)),
    }
    assert "connect is public and has no docstring" in problems


def _nothing(self: object) -> None:
    pass


_nothing.__module__ = "replicator.nothing"


@pytest.mark.parametrize(
    ("name", "shown", "hidden"),
    [
        ("ReplicatedVariable", "components, owner", "handle"),
        ("plan.Value", "", "of"),
        ("Step", "__call__, initialize, plan", "_build"),
        ("strategy.PS", "build, missing, nodes, on", "begun"),
    ],
)
def test_pages_of_classes_show_the_members_for_users(
    name: str, shown: str, hidden: str
) -> None:
    members = names.members(names.public()[names.by_short_name()[name]])
    assert ", ".join(members) == shown
    assert hidden not in members


def test_pages_list_members_that_autodoc_fills_and_methods_with_arguments() -> None:
    reference = pytest.importorskip("docs._ext.reference", reason="needs Sphinx")
    pages = reference.pages()
    assert "\n   :members: build, missing, nodes, on\n" in pages["strategy.PS.rst"]
    assert pages["plan.Value.rst"].endswith(".. autoclass:: replicator.plan.Value\n")
    assert pages["Step.rst"].endswith("\n   :special-members: __call__\n")
    for name in ("run", "select"):  # a static method is one, too
        directive = f".. automethod:: replicator.Replicator.{name}"
        assert directive in pages[f"Replicator.{name}.rst"]
    assert ".. autoproperty::" in pages["Replicator.plan.rst"]


def test_texts_name_things_in_several_ways() -> None:
    for text, full in {
        "repl.all_reduce": "replicator.Replicator.all_reduce",
        "Replicator.plan": "replicator.Replicator.plan",
        "PerReplica": "replicator.PerReplica",
        "strategy.PS": "replicator.strategy.PS",
        "replicator.connect": "replicator.connect",
    }.items():
        assert names.by_short_name()[text] == full
    assert names.aliases()["replicator.values.PerReplica"] == "replicator.PerReplica"


def test_flags_are_those_that_the_program_itself_prints() -> None:
    usage = subprocess.run(
        [sys.executable, "-m", "replicator.launch", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = programs.read("replicator.launch").flags
    assert {flag.name for flag in found} >= {"hosts", "mode", "max-restarts"}
    assert all(f"--{flag.name}" in usage for flag in found)


_EXAMPLES = [name for name in programs.examples() if name != "actors"]


@pytest.mark.parametrize("name", [*programs.names(), *_EXAMPLES])
def test_flags_of_a_program_have_help_and_stay_its_own(name: str) -> None:
    cli = importlib.import_module("benchmarks.cli")  # which has --rounds, too
    with flagsaver.flagsaver():
        absl_flags.FLAGS.mark_as_parsed()
        before = set(absl_flags.FLAGS), dict(os.environ), [*sys.path], cli.ROUNDS.value
        read = programs.read_example if name in _EXAMPLES else programs.read
        program = read(name)
        assert f"python -m {name}" in program.about or program.flags
        assert program.flags == read(name).flags
        assert all(flag.help and "%(" not in flag.help for flag in program.flags)
        after = set(absl_flags.FLAGS), dict(os.environ), [*sys.path], cli.ROUNDS.value
        assert before == after
    assert name not in _EXAMPLES or name not in sys.modules


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "tensor_parallel",
            [
                "`--devices A,B,...`",
                ": One device per replica. Default: `CPU:0,CPU:1`.",
                "`--sequence_parallel`",
                ": Divide tokens between layers, too. Default: `True`.",
            ],
        ),
        (
            "graph_mode",  # by argparse
            ["`--epochs N`", ": Passes over the training images (default: 10)."],
        ),
    ],
)
def test_flags_are_listed_with_their_defaults(name: str, lines: list[str]) -> None:
    assert {*lines} <= {*flags.text(programs.read_example(name)).splitlines()}


def test_a_program_without_flags_is_refused() -> None:
    with pytest.raises(ValueError, match="actors has neither flags of absl nor a par"):
        programs.read_example("actors")


@pytest.mark.parametrize("name", ["replicator.plan", "replicator.profile"])
def test_a_program_that_was_read_can_run(name: str) -> None:
    program = importlib.import_module(f"{name}.__main__")
    found = programs.read(name).flags
    assert importlib.import_module(f"{name}.__main__") is program
    assert found and {flag.name for flag in found} <= set(program.PROGRAM_FLAGS)
