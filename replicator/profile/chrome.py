# SPDX-License-Identifier: Apache-2.0
"""A trace as JSON for chrome://tracing and Perfetto, with the user's lines.

Source of the format: "Trace Event Format", whose complete events ("X") have a start and
a duration in microseconds, on a thread of a process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from replicator.profile.traces import Ran
from replicator.report import display
from replicator.report.rows import Row

_COMMUNICATION = "communication"
_SHARED = "all replicas"


def to_json(ran: Sequence[Ran], rows: Sequence[Row]) -> str:
    """Returns the JSON text of a trace.

    There is a process for each replica, one for ops that belong to none, and one for
    communications, with a thread for each; the others have the threads that ran the
    ops.

    Args:
        ran: The ops that ran.
        rows: The communications.
    """
    return json.dumps(
        {"traceEvents": list(_events(ran, rows)), "displayTimeUnit": "ms"}
    )


def _events(ran: Sequence[Ran], rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    if not ran:
        return
    start = min(op.start for op in ran)
    names = sorted({_process(op) for op in ran})
    threads = sorted({(op.plane, op.thread) for op in ran})
    for pid, name in enumerate(names):
        yield _metadata("process_name", pid, 0, name)
    for number in sorted({op.row for op in ran if op.row is not None}):
        pid = names.index(_COMMUNICATION)
        yield _metadata("thread_name", pid, number, _title(number, rows[number]))
    for op in ran:
        process = _process(op)
        event: dict[str, Any] = {
            "name": op.type,
            "ph": "X",
            "pid": names.index(process),
            "tid": threads.index((op.plane, op.thread)),
            "ts": (op.start - start) * 1e6,
            "dur": op.seconds * 1e6,
            "args": {"op": op.name},
        }
        if op.row is not None:
            row = rows[op.row]
            event["tid"] = op.row
            event["name"] = display.title(row)
            event["args"] = _arguments(row) | {"op": f"{op.name}:{op.type}"}
        yield event


def _process(op: Ran) -> str:
    if op.row is not None:
        return _COMMUNICATION
    return _SHARED if op.replica_id is None else f"replica {op.replica_id}"


def _title(number: int, row: Row) -> str:
    return f"{number}: {display.title(row)}, {', '.join(display.lines(row))}"


def _arguments(row: Row) -> dict[str, Any]:
    """Describes a communication."""
    return {
        "line": "\n".join(row.lines),
        "tensors": display.tensors(row),
        "algorithm": row.algorithm,
        "replicas": list(row.group),
        "pass": "backward" if row.backward else "forward",
    }


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
