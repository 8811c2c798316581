# SPDX-License-Identifier: Apache-2.0
"""Lists of tests that cannot pass with an option of ours, by the reason.

A line is a test, all cases of a test, or all tests of a file; a reason in brackets
stands before those that it is for.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

import pytest


def mark(
    items: Sequence[pytest.Item],
    path: pathlib.Path,
    fails: Callable[[str], pytest.MarkDecorator],
) -> None:
    """Marks the tests of a list.

    Args:
        items: The tests.
        path: The list.
        fails: Returns the mark for a reason.
    """
    reasons = read(path)
    for item in items:
        function = item.nodeid.partition("[")[0]
        for name in (item.nodeid, function, function.partition("::")[0]):
            if name in reasons:
                item.add_marker(fails(reasons[name]))
                break


def read(path: pathlib.Path) -> dict[str, str]:
    """Returns the reason of each line of a list."""
    reasons, reason = {}, ""
    for line in path.read_text().splitlines():
        if line.startswith("[") and line.endswith("]"):
            reason = line.strip("[]")
        elif line and not line.startswith("#"):
            reasons[line] = reason
    return reasons
