# SPDX-License-Identifier: Apache-2.0
"""Reads the profiles that TensorFlow's profiler writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class ProfileEvent:
    """One event of a profile.

    Attributes:
        plane: The device: "/host:CPU", "/device:GPU:0".
        thread: Its thread, or stream; unique within the plane.
        name: An op and its type, "replica_0/dense/MatMul:MatMul", or another event's
            name.
        start: Its beginning, in seconds from an arbitrary origin.
        seconds: Its duration.
    """

    plane: str
    thread: int
    name: str
    start: float
    seconds: float


def read_profile(text: bytes) -> Iterator[ProfileEvent]:
    """Yields the events of an .xplane.pb file.

    tf.profiler.experimental writes these files, and nothing public reads them: that is
    left to TensorBoard's plugin, a separate package.

    Args:
        text: The file's bytes.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    space.ParseFromString(text)
    for plane in space.planes:
        names = {number: event.name for number, event in plane.event_metadata.items()}
        for number, line in enumerate(plane.lines):
            for event in line.events:
                yield ProfileEvent(
                    plane.name,
                    number,
                    _op(plane, event) or names.get(event.metadata_id, ""),
                    line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12,
                    event.duration_ps * 1e-12,
                )


def _op(plane: Any, event: Any) -> str:
    """Returns the op that a GPU kernel belongs to; "" for all other events."""
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "tf_op":
            return stat.str_value or plane.stat_metadata[stat.ref_value].name
    return ""
