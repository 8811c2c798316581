# SPDX-License-Identifier: Apache-2.0
"""What ran on a commit is not repeated there, and a failure is named."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from tools import long_runs

_PASSED = "==== 7 passed, 2 skipped in 3.00s ====\n"
_FAILED = (
    "FAILED tests/a.py::test_b[x|y] - assert 1 == 2\n"
    "==== 1 failed, 6 passed in 63.10s (0:01:03) ====\nmake: *** Error 1\n"
)


@pytest.fixture(name="root")
def _root(tmp_path: pathlib.Path) -> pathlib.Path:
    """A repository whose make prints what its file `output` says, and fails if told."""
    (tmp_path / "tests" / "plan").mkdir(parents=True)
    (tmp_path / "tests" / "plan" / "test_x.py").touch()
    (tmp_path / "output").write_text(_PASSED)
    (tmp_path / ".gitignore").write_text("output\ncalls\nfails\n.long/\n")
    recipe = "\t@echo $@ $(TESTS) >> calls; cat output; test ! -e fails\n"
    (tmp_path / "Makefile").write_text(f"%:\n{recipe}")
    _git(tmp_path, "init", "--quiet")
    _commit(tmp_path)
    return tmp_path


def _git(root: pathlib.Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True)


def _commit(root: pathlib.Path) -> None:
    _git(root, "add", "--all")
    author = ["-c", "user.name=x", "-c", "user.email=x@y"]
    _git(root, *author, "commit", "--allow-empty", "-qm", "x")


def _calls(root: pathlib.Path) -> list[str]:
    """The targets that ran since this was last asked."""
    path = root / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_what_has_a_row_of_the_commit_is_not_repeated(root) -> None:
    assert long_runs.main([], root) == 0
    assert "test-long tests/plan" in _calls(root)
    _commit(root)  # of the table, which is no other tree
    assert long_runs.main([], root) == 0
    assert not _calls(root)
    assert long_runs.main(["test-hosts", "test-matrix 3.11"], root) == 0
    assert len(_calls(root)) == 3
    (root / "Makefile").write_text((root / "Makefile").read_text() + "\n")
    _commit(root)
    assert long_runs.main([], root) == 0
    assert len(_calls(root)) == len(long_runs.runs(root))


def test_rows_have_counts_and_name_what_failed(root) -> None:
    assert long_runs.main(["test-v1"], root) == 0
    (root / "output").write_text(_FAILED)
    (root / "fails").touch()
    assert long_runs.main(["test-hosts"], root) == 1
    rows = long_runs.read((root / long_runs.TABLE).read_text())
    assert rows["test-v1"].result == "7 passed, 2 skipped"
    said = "**failed**: 1 failed, 6 passed: tests/a.py::test_b[x/y]"
    assert rows["test-hosts"].result == said
    assert rows["test-v1"].commit == long_runs.commit(root)


def test_an_unknown_run_is_named_and_an_interrupted_one_has_no_row(
    root, monkeypatch, capsys
) -> None:
    assert long_runs.main(["test-v3"], root) == 2
    assert "No run is called test-v3" in capsys.readouterr().out

    def interrupted(*_) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(long_runs, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        long_runs.main(["test-v1"], root)
    assert not (root / long_runs.TABLE).exists()


def test_all_directories_with_tests_are_parts() -> None:
    parts = [name for name in long_runs.runs(long_runs.ROOT) if "test-long" in name]
    assert "test-long tests/launch" in parts and "test-long tests/test_*.py" in parts
    assert "test-long tests/clients" not in parts
