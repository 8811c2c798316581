# SPDX-License-Identifier: Apache-2.0
"""Tables for the terminal and for Markdown; numbers with a few digits."""

import pytest

from benchmarks.tables import Table, milliseconds, size

TABLE = Table("Title", ["", "a", "b"], [["x", "1", "2"]], "What it is.")


def test_markdown():
    assert TABLE.markdown() == (
        "## Title\n\nWhat it is.\n\n"
        "|  | a | b |\n| --- | ---: | ---: |\n| x | 1 | 2 |\n"
    )


def test_the_terminal_gets_all_cells(capsys):
    TABLE.show()
    printed = capsys.readouterr().out
    for text in ("Title", "What it is.", "a", "b", "x", "1", "2"):
        assert text in printed


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0001234, "0.123"), (0.00999, "9.990"), (0.0123, "12.3")]
)
def test_milliseconds(seconds, said):
    assert milliseconds(seconds) == said


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [(12, "12 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (3 << 40, "3072 GiB")],
)
def test_size(nbytes, said):
    assert size(nbytes) == said
