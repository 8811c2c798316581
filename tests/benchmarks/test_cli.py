# SPDX-License-Identifier: Apache-2.0
"""Wrong flags give one line; subprocesses are run and checked."""

import pytest

from benchmarks import cli


def test_choose_keeps_the_order_of_what_there_is():
    assert cli.choose(["c", "a"], "abc") == ["a", "c"]
    assert cli.choose(None, "abc") == ["a", "b", "c"]


@pytest.mark.parametrize("wanted", [["d"], ["a", "d"], []])
def test_choose_refuses_what_there_is_not(wanted):
    message = "error: unknown: (d|nothing); have a, b, c"
    with pytest.raises(SystemExit, match=message):
        cli.choose(wanted, "abc")


def test_numbers():
    assert cli.numbers("x", ["1", "32"]) == [1, 32]
    assert cli.numbers("x", None) is None


@pytest.mark.parametrize("given", [[], ["0"], ["-1"], ["two"], ["1", ""]])
def test_what_are_no_numbers_is_refused(given):
    with pytest.raises(SystemExit, match=r"error: --x=.*: give numbers from 1 on"):
        cli.numbers("x", given)


def test_arguments_that_are_no_flags_are_refused():
    cli.refuse_arguments(["program"])
    with pytest.raises(SystemExit, match="error: unknown: steps;"):
        cli.refuse_arguments(["program", "steps"])


def test_apart_returns_what_the_last_line_says(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "REPOSITORY", tmp_path)
    (tmp_path / "told.py").write_text(
        "import json, sys; print('x'); print(json.dumps(sys.argv[1:]))"
    )
    assert cli.apart("told", "one", "two") == ["one", "two"]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ValueError('why')", "error: -m told failed with status 1"),
        ("import time; time.sleep(60)", "error: -m told took more than 1 s"),
    ],
)
def test_apart_tells_what_went_wrong(tmp_path, monkeypatch, capfd, program, said):
    monkeypatch.setattr(cli, "REPOSITORY", tmp_path)
    (tmp_path / "told.py").write_text(program)
    with pytest.raises(SystemExit, match=said):
        cli.apart("told", timeout=1)
    assert ("why" in capfd.readouterr().err) == ("why" in program)
