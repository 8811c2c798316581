# SPDX-License-Identifier: Apache-2.0
"""Every public name has a page in the reference; checked without running Sphinx."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import subprocess
import sys

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

import replicator
from docs._ext import names, programs

_ERRORS = pathlib.Path(names.__file__).parents[1] / "reference" / "errors.md"


def test_every_public_name_has_one_page() -> None:
    assert names.missing(_ERRORS.read_text()) == []


def test_a_name_without_a_page_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator, "__all__", [*replicator.__all__, "world", "errors"])
    monkeypatch.setattr(replicator, "world", names.first_line, raising=False)
    monkeypatch.setattr(replicator.Replicator, "gossip", lambda self: 1, raising=False)
    assert names.missing(_ERRORS.read_text().replace("\n## InputError", "\n##")) == [
        "world is public and has no page: list it in docs/_ext/names.py",
        "Replicator.gossip is public and has no page: list it in docs/_ext/names.py",
        "InputError has no section in reference/errors.md",
    ]


def test_a_page_without_a_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {
        **names.METHODS,
        "Messages": ("send", "recv", "linked", "whisper", "run"),
    }
    monkeypatch.setattr(names, "METHODS", changed)
    assert names.missing(_ERRORS.read_text()) == [
        "Replicator.whisper has a page and is not public",
        "Replicator.run has two pages",
    ]


def test_every_public_name_and_member_has_a_docstring() -> None:
    assert names.undocumented() == []


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


def test_pages_list_the_members_that_autodoc_fills() -> None:
    reference = pytest.importorskip("docs._ext.reference", reason="needs Sphinx")
    pages = reference.pages()
    assert "\n   :members: build, missing, nodes, on\n" in pages["strategy.PS.rst"]
    assert pages["plan.Value.rst"].endswith(".. autoclass:: replicator.plan.Value\n")
    assert pages["Step.rst"].endswith("\n   :special-members: __call__\n")


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("repl.all_reduce", "replicator.Replicator.all_reduce"),
        ("Replicator.plan", "replicator.Replicator.plan"),
        ("PerReplica", "replicator.PerReplica"),
        ("strategy.PS", "replicator.strategy.PS"),
        ("Step", "replicator.Step"),
        ("replicator.connect", "replicator.connect"),
    ],
)
def test_texts_name_things_in_several_ways(text: str, full: str) -> None:
    assert names.by_short_name()[text] == full


def test_where_a_class_is_defined_is_known() -> None:
    assert names.aliases()["replicator.values.PerReplica"] == "replicator.PerReplica"


@pytest.mark.parametrize("name", programs.names())
def test_each_program_says_what_it_is_and_takes(name: str) -> None:
    program = programs.read(name)
    assert f"python -m {name}" in program.about or program.flags
    assert all(flag.help for flag in program.flags)


def test_flags_are_those_that_the_program_itself_prints() -> None:
    usage = subprocess.run(
        [sys.executable, "-m", "replicator.launch", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    flags = programs.read("replicator.launch").flags
    assert {flag.name for flag in flags} >= {"hosts", "mode", "max-restarts"}
    assert all(f"--{flag.name}" in usage for flag in flags)


def test_two_programs_may_have_flags_of_one_name() -> None:
    for _ in range(2):
        flags = {flag.name: flag for flag in programs.read("replicator.serve").flags}
        assert flags["watch"].takes == "stdin|none"
        assert flags["cpus"].default == "1"
        assert flags["insecure"].takes == ""


@pytest.mark.parametrize("name", ["replicator.plan", "replicator.profile"])
def test_a_program_that_was_read_can_run(name: str) -> None:
    program = importlib.import_module(f"{name}.__main__")
    flags = programs.read(name).flags
    assert importlib.import_module(f"{name}.__main__") is program
    assert flags and {flag.name for flag in flags} <= set(program.PROGRAM_FLAGS)


def test_flags_of_one_name_elsewhere_stay_as_they_are() -> None:
    cli = importlib.import_module("benchmarks.cli")  # which has --rounds, too
    with flagsaver.flagsaver():
        absl_flags.FLAGS.mark_as_parsed()
        before = cli.ROUNDS.value
        assert "rounds" in {f.name for f in programs.read("replicator.calibrate").flags}
        assert cli.ROUNDS.value == before
        assert absl_flags.FLAGS["rounds"].default == cli.ROUNDS.default


def test_methods_are_shown_with_their_arguments() -> None:
    # Where Sphinx is installed; a static method is one, too.
    reference = pytest.importorskip("docs._ext.reference")
    pages = reference.pages()
    for name in ("run", "select"):
        assert (
            f".. automethod:: replicator.Replicator.{name}"
            in (pages[f"Replicator.{name}.rst"])
        )
    assert ".. autoproperty::" in pages["Replicator.plan.rst"]
