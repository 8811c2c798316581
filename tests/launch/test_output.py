# SPDX-License-Identifier: Apache-2.0
"""The display of processes' output."""

from __future__ import annotations

import io
import pathlib
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.launch import output
from replicator.launch.output import Lines, Output


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_lines_do_not_depend_on_the_pieces(data: bytes, cuts: list[int]) -> None:
    lines = Lines()
    bounds = [0, *sorted(cuts), len(data)]
    pieces = [data[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    pieces.append(
        data[max(cuts, default=0) :] if max(cuts, default=0) > len(data) else b""
    )
    actual = [line for piece in pieces for line in lines.feed(piece)] + lines.flush()
    expected = data.split(b"\n")
    assert actual == (expected if expected[-1] else expected[:-1])


def test_long_lines_are_broken() -> None:
    lines = Lines()
    actual = lines.feed(b"x" * 200_000) + lines.feed(b"y\nz\n")
    assert [len(line) for line in actual] == [
        65536,
        65536,
        65536,
        200_001 - 3 * 65536,
        1,
    ]
    assert [len(line) for line in Lines().feed(b"x" * 70_000 + b"\n")] == [65536, 4464]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminals_have_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="there is no rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = _Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    out = Output(["a", "bcd"], None)
    out.line("a", "[red] \x1b[1mé\xff".encode(), stream)
    out.line("bcd", b"\xff", stream)
    first, second, _ = stream.getvalue().split("\n")
    assert first.endswith("[red] \x1b[1méÿ")
    assert first.startswith("\x1b[36m[a]")
    assert second.startswith("\x1b[35m[bcd]")
    assert second.endswith("\N{REPLACEMENT CHARACTER}")


def test_elsewhere_there_are_none(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    out = Output(["a", "bcd"], str(tmp_path))
    out.line("a", b"one", sys.stdout)
    out.line("bcd", b"two", sys.stderr)
    out.keep("bcd", b"three")
    out.say("a\nb")
    out.close()
    shown = capsys.readouterr()
    assert shown.out == "[a]   one\n"
    assert shown.err == "[bcd] two\nreplicator.launch: a b\n"
    assert (tmp_path / "a.log").read_text() == "one\n"
    assert (tmp_path / "bcd.log").read_text() == "two\nthree\n"


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        (b"I0000 00:00:1795804177.834556    9925 port.cc:153] oneDNN", True),
        (b"I0000 00:00:1795804177.8 12 cuda_executor.cc:1] x", True),
        (b"2026-01-01 10:00:00.123456: I tensorflow/core/a.cc:31] x", True),
        (b"2026-01-01 10:00:00.1: I external/local_xla/xla/a.cc:31] x", True),
        (
            b"WARNING: All log messages before absl::InitializeLog() is called are "
            b"written to STDERR",
            True,
        ),
        (b"I1127 18:26:40.123456 140212 train.py:12] epoch 3", False),  # of a user
        (b"I0000 00:00:1795804177.8 12 train.py:1] x", False),
        (b"I2026 4 of 5 are done", False),
        (b"2026-01-01 10:00:00.123: I am here", False),
        (b"2026-01-01 10:00:00.123: I train.cc:12] x", False),
        (b"WARNING: All log messages before absl:: are mine", False),
        (b"E0000 00:00:1795398886.4 x.cc:52] failed", False),
        (b"2026-01-01 10:00:00.123: W tensorflow/core: x", False),
        (b"I say", False),
        (b"", False),
    ],
)
def test_what_is_information(line: bytes, is_one: bool) -> None:
    assert output.is_information(line) is is_one
