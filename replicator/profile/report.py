# SPDX-License-Identifier: Apache-2.0
"""All that the program says: what was measured, and what is predicted of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from replicator.costs.rates import Calibration, Rates
from replicator.plan import display
from replicator.profile import model
from replicator.profile.parts import Measured

HERE, APART = "here", "apart"
_TITLES = {
    HERE: "on devices like these",
    APART: "on hosts of their own",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What was measured of a step, and what is predicted.

    Attributes:
        name: The program: "train:make".
        measured: What was measured.
        network: What it costs between hosts, as predictions have it.
        predicted: For HERE and APART, steps on 1 to model.MOST_REPLICAS replicas.
        strategy: That which was taken in place of the program's own; "" for its own.
        source: Where the rates of devices like these are from.
    """

    name: str
    measured: Measured
    network: Rates
    predicted: dict[str, tuple[model.Predicted, ...]]
    strategy: str = ""
    source: str = "by default"

    def verdict(self, where: str) -> str:
        """Returns in one sentence where more replicas stop to pay.

        Args:
            where: HERE or APART.
        """
        found = model.verdict(self.predicted[where])
        if found.best == 1:
            return f"{title(where)}: no number of replicas pays."
        text = (
            f"{title(where)}: {found.best} replicas compute most, "
            f"{found.speed_up:.1f} times as many examples as one"
        )
        if found.starts is not None and found.starts > 2:
            text += f"; it pays from {found.starts} on"
        if found.best == model.MOST_REPLICAS:
            text += ", and more may pay further"
        elif found.stops is None:
            text += "; more add nothing"
        else:
            text += f"; from {found.stops} on it is fewer than one alone computes"
        return text + "."

    def to_json(self) -> str:
        """Returns the JSON text of all of it; times in seconds."""
        measured = self.measured
        facts: dict[str, Any] = {
            "program": self.name,
            "strategy": self.strategy or None,
            "devices": measured.devices,
            "shared_cores": measured.cores,
            "step": measured.step,
            "alone": measured.alone,
            "busy_alone": measured.work,
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
                    dataclasses.asdict(own)
                    | {"sync": own.sync, "speed_up": own.speed_up, "pays": own.pays}
                    for own in steps
                ]
                for where, steps in self.predicted.items()
            },
            "verdict": {where: self.verdict(where) for where in self.predicted},
        }
        return json.dumps(facts, indent=1) + "\n"


def title(where: str) -> str:
    """Returns how HERE or APART is called."""
    return _TITLES[where]


def report(
    name: str,
    measured: Measured,
    calibration: Calibration,
    network: Rates,
    strategy: str = "",
    source: str = "by default",
) -> Report:
    """Returns what is to be said of what was measured.

    Args:
        name: The program.
        measured: What was measured.
        calibration: What work costs.
        network: What it costs between hosts.
        strategy: That which was taken in place of the program's own.
        source: Where the rates of devices like these are from.
    """
    numbers = range(1, model.MOST_REPLICAS + 1)
    predicted = {
        HERE: tuple(model.here(measured, n, calibration) for n in numbers),
        APART: tuple(model.apart(measured, n, calibration, network) for n in numbers),
    }
    return Report(name, measured, network, predicted, strategy, source)


def shown(steps: Sequence[model.Predicted]) -> list[model.Predicted]:
    """Returns the steps that tables show: on 1, 2, 4, ... replicas."""
    return [own for own in steps if own.replicas & (own.replicas - 1) == 0]
