# SPDX-License-Identifier: Apache-2.0
"""Numbers of bytes and durations as text, in all reports and pictures."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: int | None) -> str:
    """Formats a number of bytes, e.g. "1.5 KiB", or "?" if unknown."""
    if nbytes is None:
        return "?"
    number, unit = float(nbytes), 0
    while number >= 1024 and unit + 1 < len(_UNITS):
        number, unit = number / 1024, unit + 1
    return f"{number:.1f} {_UNITS[unit]}" if unit else f"{nbytes} B"


def duration(seconds: float) -> str:
    """Formats a duration, e.g. "1.5 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
