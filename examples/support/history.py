# SPDX-License-Identifier: Apache-2.0
"""The logged numbers of a run, step by step, and their curves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure


class History(tf.train.experimental.PythonState):
    """Logged numbers, by name, and the settings of the run.

    A part of each checkpoint, so that both belong to the same step however a run ends.

    Attributes:
        settings: The values of flags that affect the numbers.
        values: `values[name]` are the logged numbers, in order.
        steps: `steps[name][i]` is the step that `values[name][i]` belongs to.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self.values: dict[str, list[float]] = {}
        self.steps: dict[str, list[int]] = {}

    def log(self, step: int, **numbers: float) -> None:
        """Adds numbers that belong to a step."""
        for name, number in numbers.items():
            self.values.setdefault(name, []).append(float(number))
            self.steps.setdefault(name, []).append(step)

    def last(self, name: str, count: int = 1) -> float:
        """Returns the mean of the last numbers of a name."""
        return float(np.mean(self.values[name][-count:]))

    def serialize(self) -> str:
        """Called when a checkpoint is saved; returns the history as JSON."""
        rows = {"settings": self.settings, **self.values, "steps": self.steps}
        return json.dumps(rows, indent=1) + "\n"

    def deserialize(self, string_value: bytes) -> None:
        """Called when a checkpoint is restored."""
        saved = json.loads(string_value)
        self.settings, self.steps = saved.pop("settings"), saved.pop("steps")
        self.values = saved

    def save(self, path: Path) -> None:
        """Writes all of it or, if something goes wrong, nothing."""
        partial = path.with_suffix(".partial")
        try:
            partial.write_text(self.serialize())
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


@dataclasses.dataclass(frozen=True)
class Panel:
    """One of the pictures beside each other in curves.png.

    Attributes:
        names: The logged numbers that it shows.
        label: The label of the axis.
        log: Whether the axis is logarithmic.
    """

    names: Sequence[str]
    label: str
    log: bool = False


def plot_curves(
    history: History,
    panels: Sequence[Panel],
    path: Path,
    steps_per_epoch: int | None = None,
) -> None:
    """Draws the history over steps, or over epochs if their length is given."""
    figure = Figure(figsize=(4.5 * len(panels), 3.5), layout="constrained")
    axes_of_all = np.atleast_1d(figure.subplots(1, len(panels)))
    for axes, panel in zip(axes_of_all, panels, strict=True):
        for name in panel.names:
            values = history.values.get(name, [])
            steps = np.array(history.steps.get(name, [])) / (steps_per_epoch or 1)
            few = len(values) <= 100
            style = {"marker": "."} if few else {"linewidth": 1}
            axes.plot(steps, values, label=name.replace("_", " "), **style)
        axes.set(xlabel="epoch" if steps_per_epoch else "step", ylabel=panel.label)
        if panel.log:
            axes.set_yscale("log")
        if len(panel.names) > 1:
            axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
