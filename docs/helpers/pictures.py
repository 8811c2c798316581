# SPDX-License-Identifier: Apache-2.0
"""Pictures of who sends what to whom, derived from an actual run of the communication.

Each replica starts with unique numbers, each a separate bit. So the bits of a replica's
result tell which numbers of which replicas it contains. The code knows no primitive, so
a picture cannot show anything that does not happen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging
from IPython.display import HTML

_CELL, _HEIGHT, _ROW, _LEFT, _GAP, _TOP = 40, 26, 44, 84, 150, 34
# Each replica's color for its initial numbers. Dark text is readable on all of them.
_FILL = ("#9ecbf2", "#f7c583", "#a9dcae", "#e3b2dd")
_LINE = ("#2f7fc2", "#d08418", "#3b9a46", "#a94d9f")
_MIXED = "#d9dce1"
_LETTERS = "abcd"

Source = tuple[int, int]  # (replica, index of its initial number)


@dataclasses.dataclass(frozen=True)
class Ending:
    """The result of one replica.

    Attributes:
        cells: For each number, the initial numbers that it sums; () is a zero.
        columns: How many cells are in a row; 0 if there is no result.
    """

    cells: tuple[tuple[Source, ...], ...]
    columns: int


def picture(repl: Any, step_fn: Callable[[tf.Tensor], Any], size: int = 1) -> HTML:
    """Draws what a communication moves.

    Args:
        repl: A Replicator of at most four replicas.
        step_fn: Takes an int64[size] on each replica, and returns a tensor, or None
            where the replica ends with nothing.
        size: How many numbers each replica starts with.

    Returns:
        Rows of the replicas' initial numbers at the left, and their results at the
        right.
    """
    return HTML(_draw(repl.num_replicas, size, endings(repl, step_fn, size)))


def endings(
    repl: Any, step_fn: Callable[[tf.Tensor], Any], size: int
) -> tuple[Ending, ...]:
    """Returns each replica's result; the arguments are those of `picture`."""

    def traced() -> Any:
        first = repl.replica_id * size
        bits = [2 ** (first + place) for place in range(size)]
        result = step_fn(tf.constant(bits, tf.int64))
        # All replicas must return one structure: no result becomes an empty tensor.
        return tf.zeros([0], tf.int64) if result is None else result

    with _quiet():
        values = repl.run(traced)
    return tuple(_ending(value, size) for value in values)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the warning of a new step per call: each picture is one on purpose."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _ending(value: tf.Tensor, size: int) -> Ending:
    numbers = [int(number) for number in tf.reshape(value, [-1])]
    cells = tuple(
        tuple(
            divmod(bit, size) for bit in range(number.bit_length()) if number >> bit & 1
        )
        for number in numbers
    )
    return Ending(cells, int(value.shape[-1]) if value.shape.rank else 1)


# --- As SVG ---------------------------------------------------------------------------


def _draw(num_replicas: int, size: int, ends: Sequence[Ending]) -> str:
    starts = [
        Ending(tuple(((replica, place),) for place in range(size)), size)
        for replica in range(num_replicas)
    ]
    heights = [max(1, _rows(end)) * _HEIGHT + _ROW - _HEIGHT for end in ends]
    tops = [_TOP + sum(heights[:replica]) for replica in range(num_replicas)]
    widest = max(_width(end) for end in ends)
    right = _LEFT + size * _CELL + _GAP
    width, height = right + widest + 10, _TOP + sum(heights)
    parts = [_text(_LEFT, 18, "before"), _text(right, 18, "after")]
    for replica, end in enumerate(ends):
        middle = tops[replica] + max(1, _rows(end)) * _HEIGHT / 2
        parts.append(_text(0, middle + 4, f"replica {replica}"))
        parts += _arrows(replica, end, tops, ends, (_LEFT + size * _CELL, right))
    for replica, (start, end) in enumerate(zip(starts, ends, strict=True)):
        middle = tops[replica] + (max(1, _rows(end)) - 1) * _HEIGHT / 2
        parts += _boxes(start, _LEFT, middle, size)
        parts += _boxes(end, right, tops[replica], size)
    told = html.escape(_told(ends, size))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" style="max-width:100%;height:auto" fill="currentColor" '
        f'font-family="sans-serif" font-size="13" role="img" aria-label="{told}">'
        f"<title>{told}</title>{''.join(parts)}</svg>"
    )


def _rows(end: Ending) -> int:
    return len(end.cells) // end.columns if end.columns else 0


def _cell_width(end: Ending) -> int:
    longest = max((len(cell) for cell in end.cells), default=1)
    return max(_CELL, 30 * longest)


def _width(end: Ending) -> int:
    return max(60, end.columns * _cell_width(end))


def _boxes(end: Ending, left: float, top: float, size: int) -> Iterator[str]:
    if not end.cells:
        yield _text(left, top + 18, "nothing")
    wide = _cell_width(end)
    for number, cell in enumerate(end.cells):
        row, column = divmod(number, end.columns)
        x, y = left + column * wide, top + row * _HEIGHT
        owners = {replica for replica, _ in cell}
        fill = _FILL[owners.pop()] if len(owners) == 1 else _MIXED
        yield (
            f'<rect x="{x}" y="{y}" width="{wide}" height="{_HEIGHT}" fill="{fill}" '
            f'stroke="#5b6470"/><text x="{x + wide / 2}" y="{y + 18}" '
            f'text-anchor="middle" fill="#1d2329">{_label(cell, size)}</text>'
        )


def _label(cell: Sequence[Source], size: int) -> str:
    """Returns e.g. "a1+b1", or without numbers where each replica has only one."""
    names = (
        _LETTERS[replica] + (str(place + 1) if size > 1 else "")
        for replica, place in cell
    )
    return "+".join(names) or "0"


def _arrows(
    replica: int,
    end: Ending,
    tops: Sequence[float],
    ends: Sequence[Ending],
    between: tuple[float, float],
) -> Iterator[str]:
    """Yields an arrow from each replica that contributes to this one's result."""
    sources = sorted({source for cell in end.cells for source, _ in cell})
    x0, x1 = between[0] + 4, between[1] - 5
    for order, source in enumerate(sources):
        y0 = tops[source] + max(1, _rows(ends[source])) * _HEIGHT / 2
        spread = (order - (len(sources) - 1) / 2) * 5
        y1 = tops[replica] + max(1, _rows(end)) * _HEIGHT / 2 + spread
        bend = (x0 + x1) / 2
        color = _LINE[source]
        # A value that stays in place is no message.
        dashes = ' stroke-dasharray="3 4"' if source == replica else ""
        yield (
            f'<path d="M{x0} {y0}C{bend} {y0} {bend} {y1} {x1 - 6} {y1}" fill="none" '
            f'stroke="{color}" stroke-width="2"{dashes}/>'
            f'<path d="M{x1 - 7} {y1 - 4}L{x1} {y1}L{x1 - 7} {y1 + 4}z" '
            f'fill="{color}"/>'
        )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}">{html.escape(text)}</text>'


def _told(ends: Sequence[Ending], size: int) -> str:
    """Returns a description of the picture in words, for screen readers."""
    said = (
        f"replica {replica}: "
        + (", ".join(_label(cell, size) for cell in end.cells) or "nothing")
        for replica, end in enumerate(ends)
    )
    return "After it, " + "; ".join(said)
