# SPDX-License-Identifier: Apache-2.0
"""Tables as text keep their lines."""

from __future__ import annotations

from docs.helpers import wide


def test_lines_and_signs_stay() -> None:
    html = wide.wide("a  <b>\n" + "x" * 200).data
    assert "a  &lt;b&gt;\n" + "x" * 200 + "</pre>" in html
    assert "white-space: pre;" in html
