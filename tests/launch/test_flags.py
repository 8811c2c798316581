# SPDX-License-Identifier: Apache-2.0
"""The recipient of each argument, the flags' meaning, and one-line errors."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.launch import __main__ as program
from replicator.launch import flags
from replicator.launch.hosts import LaunchError

_OWN = st.lists(
    st.sampled_from(
        ["--nnodes=2", "--hosts=a,b", "--sync", "--verbose", "--env=A=b", "--grace"]
    ),
    max_size=4,
).map(
    lambda own: [
        w for flag in own for w in ([flag, "3"] if flag == "--grace" else [flag])
    ]
)
_REST = st.lists(
    st.text(max_size=6) | st.sampled_from(["--nnodes=9", "-m", "--", "--help"]),
    max_size=5,
)


@given(_OWN, st.sampled_from([["train.py"], ["-m", "train"], ["x"]]), _REST)
def test_what_follows_the_script_is_the_programs(
    own: list[str], script: list[str], rest: list[str]
) -> None:
    assert flags.split([*own, *script, *rest]) == (own, [*script, *rest])
    assert flags.split([*own, "--", *script, *rest]) == (own, [*script, *rest])


@pytest.fixture
def script(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "key").touch()
    (tmp_path / "hosts").write_text("a slots=2\nb\nc\n")
    return "train.py"


def _parse(*arguments: str) -> flags.Job:
    return flags.parse(arguments, {"HERE": "its value"}, {"localhost"})


def test_flags_are_the_job(script: str) -> None:
    job = _parse(
        *("--hosts", "a,me@b:3", "--nproc_per_node=2", "--max-restarts=4"),
        *("--start-timeout=5", "--grace=1.5", "--heartbeat=2", "--output-dir=o"),
        *("--ssh-port=2222", "--identity=key", "--python=/p", "--sync", "--tunnel"),
        *("--env=HERE", "--env", "A=b=c", "--verbose", script, "--env=x", "--a_b"),
    )
    assert [(h.name, h.slots, h.user) for h in job.hosts] == [
        ("a", 2, None),
        ("b", 3, "me"),
    ]
    assert job.source == "--hosts=a,me@b:3"
    assert job.program == ("train.py", "--env=x", "--a_b")
    assert job.env == {"HERE": "its value", "A": "b=c"}
    assert (job.max_restarts, job.start_timeout, job.grace) == (4, 5, 1.5)
    assert (job.heartbeat, job.output_dir, job.ssh_port) == (2, "o", 2222)
    assert (job.identity, job.python) == ("key", "/p")
    assert (job.sync, job.tunnel, job.insecure, job.verbose) == (
        True,
        True,
        False,
        True,
    )


def test_modes(script: str) -> None:
    assert _parse(script).mode == "in-graph"
    assert _parse("--mode=between", script).mode == "between"
    # If it runs on other hosts only, it may exist there only.
    job = _parse("--mode=between", "--hosts=a,b", "there.py")
    assert job.program == ("there.py",)


def test_hosts_of_a_file_and_of_numbers(script: str) -> None:
    job = _parse("--hostfile=hosts", "--nnodes=2", "--nproc-per-node=4", script)
    assert [(host.name, host.slots) for host in job.hosts] == [("a", 2), ("b", 4)]
    assert job.source == "--hostfile=hosts"
    job = _parse("--nnodes=2", "--nproc-per-node=4", script)
    assert [(host.name, host.slots, host.local) for host in job.hosts] == [
        ("localhost-0", 4, True),
        ("localhost-1", 4, True),
    ]
    assert [host.name for host in _parse(script).hosts] == ["localhost-0"]


_BAD = [
    ([], "there is no program to run; usage: python -m replicator.launch [FLAGS]"),
    (["--nnodes=2"], "there is no program to run"),
    (["-m"], "there is no program to run"),
    (["none.py"], "the program none.py does not exist"),
    ([""], "the program does not exist"),
    (["--nnodes"], "expected one argument"),
    (
        ["--nnodes=0", "train.py"],
        "argument --nnodes: '0' is not a number from 1 to 4096",
    ),
    (["--nnodes=x", "train.py"], "'x' is not a number from 1 to 4096"),
    (["--nproc-per-node=-1", "train.py"], "'-1' is not a number"),
    (["--heartbeat=nan", "train.py"], "'nan' is not a number from 0.1 to 86400"),
    (["--start-timeout=inf", "train.py"], "'inf' is not a number"),
    (["--ssh-port=70000", "train.py"], "'70000' is not a number from 1 to 65535"),
    (["--nnodes=2", "--min-nodes=3", "train.py"], "--min-nodes=3, but there are 2 h"),
    (["--max-restarts=1.5", "train.py"], "'1.5' is not a number from 0"),
    (["--what", "train.py"], "unrecognized arguments: --what"),
    (["--host=a", "train.py"], "unrecognized arguments: --host=a"),
    (["--mode=between", "none.py"], "the program none.py does not exist"),
    (["--mode=between", "--min-nodes=1", "train.py"], "--min-nodes is for --mode=in-g"),
    (["--mode=x", "train.py"], "argument --mode: invalid choice: 'x'"),
    (["--hosts=a", "--hostfile=hosts", "train.py"], "leave out one"),
    (["--hosts=a,a", "train.py"], "a is named twice"),
    (["--hosts=a", "--nnodes=2", "train.py"], "--nnodes=2, but --hosts=a names 1"),
    (["--hostfile=no", "train.py"], "--hostfile: no: No such file or directory"),
    (["--hostfile=.", "train.py"], "--hostfile: .: Is a directory"),
    (["--env=1", "train.py"], "'1' is not of the form NAME or NAME=VALUE"),
    (["--env=NOT_SET_ANYWHERE", "train.py"], "there is no such variable"),
    (["--hosts=a", "--identity=no", "train.py"], "--identity: no: No such file or"),
    (["--hosts=a", "--identity=.", "train.py"], "--identity: .: Is a directory"),
    (["--sync", "train.py"], "--sync is for other hosts, but none is named"),
    (["--ssh-port=22", "train.py"], "--ssh-port is for other hosts"),
    (["--hosts=a", "--tunnel", "--insecure", "train.py"], "leave out one"),
]


@pytest.mark.parametrize(("arguments", "said"), _BAD)
def test_bad_flags_are_one_line(
    script: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    assert program.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("replicator.launch: ")
    assert said in shown.err


@given(st.lists(st.text(max_size=12) | st.sampled_from([*flags._FLAGS]), max_size=4))
def test_whatever_is_given_is_parsed_or_refused(arguments: list[str]) -> None:
    given_flags = [f"--{argument}" for argument in arguments]
    if any(argument.startswith("--help") for argument in given_flags):
        return
    try:
        flags.parse(given_flags, {}, set())
    except LaunchError:
        pass


def test_an_output_folder_that_cannot_be(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--output-dir=train.py/x", script]) == 2
    assert capsys.readouterr().err == (
        "replicator.launch: --output-dir: train.py/x: Not a directory\n"
    )
    assert program.main(["--output-dir=train.py", script]) == 2
    assert "--output-dir: train.py: File exists" in capsys.readouterr().err


def test_help_lists_all_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        program.main(["--help"])
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in flags._FLAGS)


def test_flags_are_checked_before_tensorflow_is_imported() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "replicator.launch", "--typo"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert "replicator.launch: unrecognized arguments: --typo" in done.stderr
    assert "tensorflow" not in done.stderr
    assert "replicator.launch.flags" in done.stderr  # it does list what is imported
