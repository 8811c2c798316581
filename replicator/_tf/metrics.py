# SPDX-License-Identifier: Apache-2.0
"""Finds out from the Python stack which method of a Keras metric is running.

A variable is not told by which metric it is read or written, nor what that was given.
"""

from __future__ import annotations

import sys
import types
from typing import Any, NamedTuple

_METRICS = ("keras.src.metrics", "tf_keras.src.metrics")


class MetricCall(NamedTuple):
    """A running method of a Keras metric.

    Attributes:
        metric: The metric.
        given: The method's arguments by their names, as they are by now.
    """

    metric: Any
    given: dict[str, Any]


def metric_call(method: str) -> MetricCall | None:
    """Returns the innermost running call of a method of Keras metrics, if any.

    Args:
        method: Its name, e.g. "update_state".
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name.removeprefix("tf__") == method:
            args = frame.f_locals
            if _is_metric(args.get("self")):
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                given = {name: args[name] for name in names if name in args}
                return MetricCall(given.pop("self"), given)
        frame = frame.f_back
    return None


def _is_metric(what: Any) -> bool:
    return any(base.__module__.startswith(_METRICS) for base in type(what).__mro__)


def is_mean(metric: Any) -> bool:
    """Whether a Keras metric is a Mean, of values that it is given or computes."""
    return any(
        base.__name__ == "Mean" and base.__module__.startswith(_METRICS)
        for base in type(metric).__mro__
    )
