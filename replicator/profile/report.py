# SPDX-License-Identifier: Apache-2.0
"""The complete report of the program: measurements and predictions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from replicator.costs.rates import Calibration, Rates
from replicator.profile import model
from replicator.profile.parts import Measured
from replicator.report import display

ON_THESE_DEVICES, ON_SEVERAL_HOSTS = "here", "apart"


@dataclasses.dataclass(frozen=True)
class Report:
    """The measurement of a step, and the predictions.

    Attributes:
        name: The program: "train:make".
        measured: The measurement.
        network: The rates between hosts that predictions assume.
        predicted: For ON_THESE_DEVICES and ON_SEVERAL_HOSTS, steps on 1 to
            model.MOST_REPLICAS replicas; empty if the program only runs on all of its
            replicas.
        strategy: The strategy used instead of the program's own; "" for its own.
        source: The source of the rates of devices like these.
    """

    name: str
    measured: Measured
    network: Rates
    predicted: dict[str, tuple[model.Predicted, ...]]
    strategy: str = ""
    source: str = "by default"

    def title(self, setting: str) -> str:
        """Returns the title of ON_THESE_DEVICES or ON_SEVERAL_HOSTS."""
        if setting == ON_SEVERAL_HOSTS:
            return "on hosts of their own"
        cores = self.measured.cores
        if cores is None:
            return "on further devices like these"
        return f"on these same {cores} cores" if cores > 1 else "on this same core"

    def verdict(self, setting: str) -> str:
        """Says in one sentence which numbers of replicas pay.

        Args:
            setting: ON_THESE_DEVICES or ON_SEVERAL_HOSTS.
        """
        outcome = model.verdict(self.predicted[setting])
        if outcome.best == 1:
            return f"{self.title(setting)}: no number of replicas pays."
        text = (
            f"{self.title(setting)}: {outcome.best} replicas compute the most "
            f"examples, {outcome.speed_up:.1f} times as many as one, so that an epoch "
            f"takes {1 / outcome.speed_up:.2g} of the time"
        )
        if outcome.starts is not None and outcome.starts > 2:
            text += f"; it pays from {outcome.starts} on"
        if outcome.best == model.MOST_REPLICAS:
            text += ", and more may pay further"
        elif outcome.stops is None:
            text += "; more add nothing"
        else:
            text += f"; from {outcome.stops} on, they compute fewer than one alone"
        return text + "."

    def to_json(self) -> str:
        """Returns the report as JSON; times are in seconds."""
        measured = self.measured
        facts: dict[str, Any] = {
            "program": self.name,
            "strategy": self.strategy or None,
            "devices": measured.devices,
            "shared_cores": measured.cores,
            "step": measured.step,
            "alone": measured.alone or None,
            "busy_alone": measured.work or None,
            "needs_all": measured.needs_all or None,
            "fixed": measured.fixed,
            "compute": measured.compute,
            "once": measured.once,
            "spread": measured.spread,
            "rates": self.source,
            "communication": [
                {
                    "what": display.title(row),
                    "lines": row.lines,
                    "bytes": row.nbytes,
                    "seconds": seconds,
                }
                for row, seconds in zip(
                    measured.rows, measured.communication, strict=True
                )
            ],
            "network": {
                "latency": self.network.message,
                "bytes_per_second": 1 / self.network.link
                if self.network.link
                else None,
            },
            "predicted": {
                where: [
                    dataclasses.asdict(prediction)
                    | {
                        "sync": prediction.sync,
                        "speed_up": prediction.speed_up,
                        "pays": prediction.pays,
                    }
                    for prediction in steps
                ]
                for where, steps in self.predicted.items()
            },
            "verdict": {where: self.verdict(where) for where in self.predicted},
        }
        return json.dumps(facts, indent=1) + "\n"


def report(
    name: str,
    measured: Measured,
    calibration: Calibration,
    network: Rates,
    strategy: str = "",
    source: str = "by default",
) -> Report:
    """Makes predictions from a measurement, and returns the report.

    Args:
        name: The program.
        measured: The measurement.
        calibration: The rates of work.
        network: The rates between hosts.
        strategy: The strategy used instead of the program's own.
        source: The source of the rates of devices like these.
    """
    if measured.needs_all:
        return Report(name, measured, network, {}, strategy, source)
    numbers = range(1, model.MOST_REPLICAS + 1)
    predicted = {
        ON_THESE_DEVICES: tuple(
            model.on_these_devices(measured, n, calibration) for n in numbers
        ),
        ON_SEVERAL_HOSTS: tuple(
            model.on_several_hosts(measured, n, calibration, network) for n in numbers
        ),
    }
    return Report(name, measured, network, predicted, strategy, source)


def powers_of_two(steps: Sequence[model.Predicted]) -> list[model.Predicted]:
    """Returns the steps that tables show: on 1, 2, 4, ... replicas."""
    return [
        prediction
        for prediction in steps
        if prediction.replicas & (prediction.replicas - 1) == 0
    ]
