# SPDX-License-Identifier: Apache-2.0
"""Draws the plan of a program for one device: its ops, by the forms that they make."""

from __future__ import annotations

import html
import re

import tensorflow as tf
from IPython.display import SVG

from replicator.forms.forms import Form, Partial, Replicated, Sharded
from replicator.forms.propagate import GraphPlan
from replicator.forms.rule import Version

_WIDTH, _HEIGHT, _GAP, _ROW, _TOP = 190, 26, 90, 36, 50
_COLUMNS = ("Sharded", "Partial", "Replicated")
_FILL = {"Sharded": "#d5e6f7", "Partial": "#fde3bd", "Replicated": "#e6e6e6"}
_CALLS = {
    ("Partial", "Replicated"): "all_reduce",
    ("Sharded", "Replicated"): "all_gather",
    ("Replicated", "Sharded"): "its part",
}
Place = tuple[float, float]


def draw(plan: GraphPlan) -> SVG:
    """Draws the ops of a plan that compute tensors of more than shapes.

    An op stands in the column of the form of its first output. Where an op takes
    another form than its input has, the arrow is red and says what converts it.

    Args:
        plan: The plan of a graph.
    """
    inputs = [t.op for t in plan.inputs if t.dtype != tf.resource]
    ops = [op for op in [*inputs, *plan.plans] if _is_drawn(op)]
    columns = {op: _kind(_made(plan, op)) for op in ops}
    places = {
        op: (20.0 + _COLUMNS.index(columns[op]) * (_WIDTH + _GAP), _TOP + k * _ROW)
        for k, op in enumerate(ops)
    }
    width = 40 + len(_COLUMNS) * (_WIDTH + _GAP) - _GAP
    height = _TOP + len(ops) * _ROW + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#667"/></marker>'
        "</defs>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for k, name in enumerate(_COLUMNS):
        middle = 20 + k * (_WIDTH + _GAP) + _WIDTH / 2
        parts.append(
            f'<text x="{middle}" y="26" text-anchor="middle" font-weight="bold">'
            f"{name}</text>"
        )
    for op in ops:
        for tensor, call in _sources(plan, op):
            if tensor.op in places:
                parts.append(_arrow(places[tensor.op], places[op], call))
    parts += [_box(op, places[op], columns[op]) for op in ops]
    return SVG("\n".join([*parts, "</svg>"]))


def _is_drawn(op: tf.Operation) -> bool:
    """Whether an op is more than a constant, a shape or bookkeeping."""
    if op.type in ("Const", "NoOp") or re.match("Shape|Broadcast.*Args", op.type):
        return False
    return not op.outputs or op.outputs[0].dtype not in (tf.int32, tf.resource)


def _made(plan: GraphPlan, op: tf.Operation) -> Form:
    return plan.fact(op.outputs[0]).form if op.outputs else Replicated()


def _kind(form: Form) -> str:
    return type(form).__name__ if isinstance(form, Sharded | Partial) else "Replicated"


def _sources(plan: GraphPlan, op: tf.Operation) -> list[tuple[tf.Tensor, str]]:
    """Returns the inputs of an op, each with what converts it, or an empty string."""
    if op not in plan.plans:
        return []
    result = []
    for tensor, need in zip(op.inputs, plan.plans[op].needs, strict=True):
        have = _kind(plan.fact(tensor).form)
        want = have if isinstance(need, Version) else _kind(need)
        result.append((tensor, _CALLS.get((have, want), "")))
    return result


def _box(op: tf.Operation, place: Place, column: str) -> str:
    x, y = place
    name = op.name.rpartition("/")[2]
    label = name if op.type == "Placeholder" else op.type
    return (
        f"<g><title>{html.escape(op.name)}</title>"
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" '
        f'fill="{_FILL[column]}" stroke="#8193ab"/>'
        f'<text x="{x + _WIDTH / 2}" y="{y + 17}" text-anchor="middle" fill="#222">'
        f"{html.escape(label)}</text></g>"
    )


def _arrow(begin: Place, end: Place, call: str) -> str:
    x0, y0 = begin[0] + _WIDTH / 2, begin[1] + _HEIGHT
    x1, y1 = end[0] + _WIDTH / 2, end[1]
    if begin[0] != end[0]:
        right = end[0] > begin[0]
        x0, y0 = begin[0] + (_WIDTH if right else 0), begin[1] + _HEIGHT / 2
        x1, y1 = end[0] + (0 if right else _WIDTH), end[1] + _HEIGHT / 2
    elif y1 - y0 > _ROW:  # around other boxes
        x0 = x1 = end[0]
        y0, y1 = begin[1] + _HEIGHT / 2, end[1] + _HEIGHT / 2
    bend = (x0 + x1) / 2 if x0 != x1 else x0 - 14 - (y1 - y0) / 30
    curve = f"M{x0} {y0}C{bend} {y0} {bend} {y1} {x1} {y1}"
    straight = f"M{x0} {y0}L{x1} {y1}"
    is_short = begin[0] == end[0] and y1 - y0 <= _ROW
    color = "#c0392b" if call else "#667"
    text = (
        f'<text x="{x1 - 8}" y="{y1 + 14}" text-anchor="end" fill="{color}" '
        f'font-size="11">{call}</text>'
    )
    return (
        f'<path d="{straight if is_short else curve}" fill="none" stroke="{color}" '
        f'marker-end="url(#to)"/>{text if call else ""}'
    )
