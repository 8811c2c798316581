# SPDX-License-Identifier: Apache-2.0
"""Text with long lines, which scrolls where other output wraps."""

from __future__ import annotations

import html

from IPython.display import HTML


def wide(value: object) -> HTML:
    """Returns the output of `print`, in a box that scrolls sideways.

    Args:
        value: A Strategy, or any other object that prints as a wide table.
    """
    text = html.escape(str(value))
    style = "white-space: pre; overflow-x: auto; line-height: 1.2"
    return HTML(f'<pre style="{style}">{text}</pre>')
