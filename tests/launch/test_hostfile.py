# SPDX-License-Identifier: Apache-2.0
"""The lines of hostfiles, which the launcher and `connect` parse alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.launch import hostfile


def test_lines() -> None:
    text = "# ours\n\na\n b:2  slots=3 max-slots=4096 # fast\n[::1]:7 max_slots=1"
    assert hostfile.lines(text) == [
        hostfile.Line(3, "a", None, None),
        hostfile.Line(4, "b:2", 3, 4096),
        hostfile.Line(5, "[::1]:7", None, 1),
    ]


@pytest.mark.parametrize("word", ["slots", "cpus=1", "slots=", "slots=0", "slots=4097"])
def test_what_is_wrong_has_a_line(word: str) -> None:
    with pytest.raises(hostfile.HostfileError) as raised:
        hostfile.lines(f"a\n\nb {word}")
    assert raised.value.number == 3
    assert "slots" in str(raised.value)


@given(st.text(alphabet="a0 1=slotmax_-#\n\t:[]"))
def test_any_text_is_lines_or_an_error(text: str) -> None:
    try:
        parsed = hostfile.lines(text)
    except hostfile.HostfileError as error:
        assert 1 <= error.number <= len(text.splitlines())
        return
    for line in parsed:
        assert line.host == text.splitlines()[line.number - 1].split()[0].split("#")[0]
