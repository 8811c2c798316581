# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow's profiler has written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Traced:
    """Something that ran while the profiler did.

    Attributes:
        plane: Where: "/host:CPU", "/device:GPU:0".
        thread: On which thread, or stream; unique within the plane.
        name: What: "replica_0/dense/MatMul:MatMul" is an op and its type.
        start: When it began, in seconds since whenever.
        seconds: How long it took.
    """

    plane: str
    thread: int
    name: str
    start: float
    seconds: float


def read_profile(text: bytes) -> Iterator[Traced]:
    """Yields what an .xplane.pb file holds.

    tf.profiler.experimental writes these files, and nothing public reads them: that is
    left to TensorBoard's plugin, a package of its own.

    Args:
        text: The file's bytes.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(text)
    for plane in space.planes:
        names = {number: own.name for number, own in plane.event_metadata.items()}
        for number, line in enumerate(plane.lines):
            for event in line.events:
                yield Traced(
                    plane.name,
                    number,
                    _op(plane, event) or names.get(event.metadata_id, ""),
                    line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12,
                    event.duration_ps * 1e-12,
                )


def _op(plane: Any, event: Any) -> str:
    """Returns the op that a kernel of a GPU belongs to; "" for what is no kernel."""
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "tf_op":
            return stat.str_value or plane.stat_metadata[stat.ref_value].name
    return ""
