# SPDX-License-Identifier: Apache-2.0
"""Measures torch and JAX: `python -m benchmarks.peers [--only=torch,JAX]`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from typing import Any

from absl import app

from benchmarks import cli, results, timing
from benchmarks.peers import nets, ratios

# [framework]: its module, and its processes' environment variables.
FRAMEWORKS = {
    "torch": ("torch_ddp", {"GLOO_SOCKET_IFNAME": "lo"}),
    "JAX": (
        "jax_devices",
        {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
        },
    ),
}
WARM_UP = 5
NETWORKS = {workload.name: workload for workload in nets.WORKLOADS}


def measure(framework: str, network: str) -> dict[str, Any]:
    """Measures all contenders of a framework in this process.

    Returns:
        By contender, a Measured as a dict.
    """
    module, environment = FRAMEWORKS[framework]
    os.environ.update(environment)  # before any import reads it
    program = importlib.import_module(f"benchmarks.peers.{module}")
    workload = NETWORKS[network]
    with program.runs(workload) as runs:
        measured = timing.measure(
            runs, cli.steps(workload.steps), cli.rounds(), WARM_UP
        )
    if not timing.agree(measured, list(measured)):
        losses = {name: measurement.losses for name, measurement in measured.items()}
        cli.fail(f"{framework}, {network}: different losses, {losses}")
    return {
        name: dataclasses.asdict(measurement) for name, measurement in measured.items()
    }


def main(argv: list[str]) -> None:
    """Measures each in its own process, prints the table and writes the JSON."""
    cli.refuse_arguments(argv)
    if cli.CELL.value is not None:
        print(json.dumps(measure(*cli.CELL.value.split("/"))))
        return
    names = cli.chosen(FRAMEWORKS)
    about = results.facts()
    measurements: dict[str, dict[str, Any]] = {}
    for framework in names:
        measurements[framework] = {}
        for network in NETWORKS:
            cli.progress(f"peers: measuring {framework}, {network} ...")
            measurements[framework][network] = cli.apart(
                "benchmarks.peers",
                f"--cell={framework}/{network}",
                f"--quick={cli.QUICK.value}",
                f"--steps={cli.steps(NETWORKS[network].steps)}",
                f"--rounds={cli.rounds()}",
            )
    cli.finish(ratios.NAME, about, measurements, ratios.tables(measurements))


if __name__ == "__main__":
    app.run(main)
