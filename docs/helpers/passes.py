# SPDX-License-Identifier: Apache-2.0
"""Pictures of a step's graph after each pass of its build, taken from a real build.

For this, the passes that `step/building.py` calls are wrapped to record the graph after
each.
"""

from __future__ import annotations

import dataclasses
import html
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf
from IPython.display import SVG, display

from replicator._tf import ops as tf_ops
from replicator.graph.ir import placeholder, walk
from replicator.graph.ir.kinds import has_effect
from replicator.step import building
from replicator.step.known import Traced

_WIDTH, _HEIGHT, _GAP, _ROW = 190, 26, 70, 40
_OTHER = "inputs"  # the column of ops outside all replicas' devices
_COLORS = {
    "old": ("#eef2f7", "#8193ab"),
    "new": ("#d3f0d6", "#2e8b3d"),
    "call": ("#fde3bd", "#c77f1a"),
    "dead": ("#fafafa", "#c9c9c9"),
}


@dataclasses.dataclass(frozen=True)
class Op:
    """An op's state after a pass.

    Attributes:
        name: The name in the graph.
        kind: The op type, or the kind of a captured tensor.
        device: The last part of its device's name, e.g. "CPU:0".
        inputs: The names of the ops that compute its inputs.
        controls: The names of its control inputs.
        live: Whether it would run: a result or an effect of the step needs it.
        call: Whether it is a placeholder for communication that is not lowered yet.
    """

    name: str
    kind: str
    device: str
    inputs: tuple[str, ...]
    controls: tuple[str, ...]
    live: bool
    call: bool


@dataclasses.dataclass(frozen=True)
class After:
    """A step's graph after one of its passes."""

    name: str
    about: str
    ops: tuple[Op, ...]


def functions() -> dict[str, Callable[..., Any]]:
    """Returns the passes by name: what building.py calls of other files of step/."""
    return {
        name: value
        for name, value in vars(building).items()
        if inspect.isfunction(value)
        and value.__module__.startswith("replicator.step.")
        and value.__module__ != building.__name__
    }


def watch(build: Callable[[], Any]) -> list[After]:
    """Returns the graph after each pass of the step that a function builds.

    Args:
        build: Builds and runs a step.
    """
    snapshots: list[After] = []
    results: list[Any] = []  # what step_fn has returned

    def looked_at(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = apply(*args)
            if name == "seal_results":
                results[:] = result
            elif isinstance(result, Traced):
                results[:] = result.returned
            about = (apply.__doc__ or "").partition("\n")[0]
            snapshots.append(After(name, about, _ops(results)))
            return result

        return run

    watched: dict[str, Any] = {
        name: looked_at(name, apply) for name, apply in functions().items()
    }
    with mock.patch.multiple(building, **watched):
        build()
    return snapshots[-len(watched) :]  # the last attempt, if there were several


def _ops(returned: Sequence[Any]) -> tuple[Op, ...]:
    graph = tf.compat.v1.get_default_graph()
    ops = [op for op in graph.get_operations() if not tf_ops.is_abandoned(op)]
    leaves = [leaf for leaf in tf.nest.flatten(returned) if leaf is not None]
    roots = [leaf.op if tf.is_tensor(leaf) else leaf for leaf in leaves]
    live = walk.upstream([*roots, *(op for op in ops if has_effect(op))])
    return tuple(
        Op(
            *(op.name, _kind(op), _device(op)),
            tuple(dict.fromkeys(tensor.op.name for tensor in op.inputs)),
            tuple(dict.fromkeys(other.name for other in op.control_inputs)),
            op in live,
            placeholder.read(op) is not None,
        )
        for op in ops
    )


def _kind(op: tf.Operation) -> str:
    if op.type != "Placeholder":
        return op.type
    is_handle = op.outputs[0].dtype == tf.resource
    return "handle of a variable" if is_handle else "argument"


def _device(op: tf.Operation) -> str:
    device = tf.DeviceSpec.from_string(op.device or "")
    if op.type == "Placeholder":
        return _OTHER
    if device.device_type is not None:
        return f"{device.device_type}:{device.device_index}"
    replica = re.match(r"replica_(\d+)/", op.name)  # reads go with their variable
    return f"CPU:{replica[1]}" if replica else _OTHER


# --- As a picture ---------------------------------------------------------------------


def show(seen: Sequence[After], name: str) -> None:
    """Displays the graph before and after a pass.

    Args:
        seen: The graph after each pass of a build.
        name: The pass, which is not the first.
    """
    k = [one.name for one in seen].index(name)
    if any(op.live for op in seen[k - 1].ops):  # else there is nothing to draw yet
        display(draw(seen[k - 1]))
    display(draw(seen[k], seen[k - 1]))


def draw(after: After, before: After | None = None) -> SVG:
    """Draws the graph after a pass; ops that it added are green.

    Communication that is not lowered yet is orange. Ops that no result or effect needs
    any more are grey; TensorFlow prunes them. Dashed lines are control edges.

    Args:
        after: The graph to draw.
        before: The graph before the pass; without it, no op is new.
    """
    known_ops = {op.name for op in (before or after).ops}
    shown = [op for op in after.ops if op.live or op.name in known_ops]
    # Ops that were dead before the pass are omitted.
    was = {op.name: op.live for op in (before or after).ops}
    shown = [op for op in shown if op.live or was.get(op.name, True)]
    columns = sorted({op.device for op in shown}, key=lambda d: (d != _OTHER, d))
    rows = _rows(shown)
    left = {device: 20 + k * (_WIDTH + _GAP) for k, device in enumerate(columns)}
    places = {op.name: (left[op.device], 50 + rows[op.name] * _ROW) for op in shown}
    width = left[columns[-1]] + _WIDTH + 20
    height = 60 + (max(rows.values()) + 1) * _ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#667"/></marker>'
        "</defs>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for device in columns:
        middle = left[device] + _WIDTH / 2
        parts.append(
            f'<text x="{middle}" y="26" text-anchor="middle" font-weight="bold">'
            f"{device}</text>"
        )
    for op in shown:
        for sources, dash in ((op.inputs, ""), (op.controls, "4 3")):
            for source in sources:
                if source in places:
                    parts.append(_edge(places[source], places[op.name], dash, op.live))
    for op in shown:
        look = "new" if op.name not in known_ops else "old"
        if op.call:
            look = "call"
        parts.append(_box(op, places[op.name], look if op.live else "dead"))
    return SVG("\n".join([*parts, "</svg>"]))


def _rows(ops: Sequence[Op]) -> dict[str, int]:
    """Returns rows in which all arrows lead downwards, and boxes do not overlap."""
    by_name = {op.name: op for op in ops}
    rows: dict[str, int] = {}
    cells: set[tuple[str, int]] = set()

    def place(op: Op, around: frozenset[str]) -> int:
        if op.name in rows:
            return rows[op.name]
        row = 0
        for source in (*op.inputs, *op.controls):
            if source in by_name and source not in around:
                row = max(row, place(by_name[source], around | {op.name}) + 1)
        while (op.device, row) in cells:
            row += 1
        cells.add((op.device, row))
        rows[op.name] = row
        return row

    for op in ops:
        place(op, frozenset())
    return rows


Place = tuple[float, float]


def _box(op: Op, place: Place, look: str) -> str:
    fill, line = _COLORS[look]
    x, y = place
    color = "#aaa" if look == "dead" else "#222"
    tip = html.escape(f"{op.kind} {op.name}")
    return (
        f'<g><title>{tip}</title><rect x="{x}" y="{y}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" rx="5" fill="{fill}" stroke="{line}"/>'
        f'<text x="{x + _WIDTH / 2}" y="{y + 17}" text-anchor="middle" fill="{color}">'
        f"{html.escape(_label(op))}</text></g>"
    )


def _label(op: Op) -> str:
    """Returns the op type, with what its name adds to that."""
    last = op.name.rpartition("/")[2]
    plain = last.rstrip("0123456789").rstrip("_")
    if op.call:
        return plain
    if (
        op.kind == "argument"
        or " " in op.kind
        or re.fullmatch(r"n?\d*", last)
        or plain.lower() in op.kind.lower()
    ):
        return op.kind
    text = f"{op.kind} {plain}"
    return text if len(text) <= 29 else f"{text[:28]}…"


def _edge(begin: Place, end: Place, dash: str, live: bool) -> str:
    x0, y0 = begin[0] + _WIDTH / 2, begin[1] + _HEIGHT
    x1, y1 = end[0] + _WIDTH / 2, end[1]
    if begin[0] != end[0]:  # from one device to another: leave at the side
        right = end[0] > begin[0]
        x0, y0 = begin[0] + (_WIDTH if right else 0), begin[1] + _HEIGHT / 2
        x1, y1 = end[0] + (0 if right else _WIDTH), end[1] + _HEIGHT / 2
        bend = (x0 + x1) / 2
        path = f"M{x0} {y0}C{bend} {y0} {bend} {y1} {x1} {y1}"
    elif y1 - y0 > _ROW:  # around other boxes
        bend = end[0] - 14 - (y1 - y0) / 30
        x0 = x1 = end[0]
        y0, y1 = begin[1] + _HEIGHT / 2, end[1] + _HEIGHT / 2
        path = f"M{x0} {y0}C{bend} {y0} {bend} {y1} {x1} {y1}"
    else:
        path = f"M{x0} {y0}L{x1} {y1}"
    color = "#667" if live else "#ccc"
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path d="{path}" fill="none" stroke="{color}"{dashes} '
        'marker-end="url(#end)"/>'
    )
