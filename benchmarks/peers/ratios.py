# SPDX-License-Identifier: Apache-2.0
"""The cost of two replicas in each framework, relative to its own single device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import timing
from benchmarks.tables import Table, milliseconds

NAME = "peers"
SINGLE = "one device"


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns the table of ratios.

    Args:
        found: `found[framework][network][contender]` is a Measured as a dict; one
            contender is SINGLE.
    """
    rows = []
    for framework, by_network in found.items():
        for network, by_name in by_network.items():
            measured = {n: timing.Measured.from_json(m) for n, m in by_name.items()}
            alone = measured.pop(SINGLE)
            rows += [
                [
                    f"{network}, {framework}",
                    name,
                    milliseconds(alone.median),
                    milliseconds(fields.median),
                    f"{timing.ratio(fields, alone):.2f}",
                    f"{alone.spread:.1%}",
                ]
                for name, fields in measured.items()
            ]
    return [
        Table(
            "Peers, in ms",
            ["", "by", SINGLE, "two replicas", f"of {SINGLE}", "noise"],
            sorted(rows, key=lambda row: row[0]),
            "Each framework beside its own single device with the whole batch, with as "
            "many threads in all as there are cores.",
        )
    ]
