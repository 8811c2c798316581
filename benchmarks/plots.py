# SPDX-License-Identifier: Apache-2.0
"""The plots of RESULTS.md, drawn with matplotlib."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks import allreduce, build, scaling, timing

# One color per contender in all plots.
_COLORS = tuple(f"C{number}" for number in range(10))


def _axes(
    title: str, x: str, y: str, ticks: Mapping[int, str]
) -> tuple[pyplot.Figure, pyplot.Axes]:
    figure, axes = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    axes.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.grid(alpha=0.3)
    return figure, axes


def steps(found: Mapping[str, Any], workload: str) -> pyplot.Figure:
    """Returns step time over replicas, for one network of benchmarks.scaling."""
    by_number = found[workload]
    figure, axes = _axes(
        f"Step, {workload} MLP, the same batch in all",
        "replicas",
        "ms",
        {int(number): number for number in by_number},
    )
    names = list(next(iter(by_number.values())))
    for color, name in zip(_COLORS, names, strict=False):
        times = [timing.Measured.from_json(by_number[n][name]) for n in by_number]
        numbers = [int(number) for number in by_number]
        axes.plot(numbers, [t.median * 1e3 for t in times], "o-", c=color, label=name)
    axes.legend()
    return figure


def builds(found: Mapping[str, Any], network: str) -> pyplot.Figure:
    """Returns build time over replicas, for one network of benchmarks.build."""
    by_name = {
        name: build.from_json(builds_by_count)
        for name, builds_by_count in found[network].items()
    }
    counts = sorted({count for by_count in by_name.values() for count in by_count})
    figure, axes = _axes(
        f"Until the first result, {network} MLP",
        "replicas",
        "s",
        {count: str(count) for count in counts},
    )
    for color, (name, built) in zip(_COLORS, by_name.items(), strict=False):
        times = [builds_by_count.total for builds_by_count in built.values()]
        axes.plot(list(built), times, "o-", c=color, label=name)
    axes.legend()
    return figure


def bandwidth(found: Mapping[str, Any]) -> pyplot.Figure:
    """Returns all-reduce bandwidth over size, of benchmarks.allreduce."""
    sizes = {allreduce.SIZES[size]: size for size in found}
    figure, axes = _axes(
        "All-reduce alone", "size of each replica's tensor", "GB/s", sizes
    )
    names = list(next(iter(found.values())))
    for color, name in zip(_COLORS, names, strict=False):
        times = [timing.Measured.from_json(found[size][name]) for size in found]
        rates = [n / t.median / 1e9 for n, t in zip(sizes, times, strict=True)]
        axes.plot(list(sizes), rates, "o-", c=color, label=name)
    axes.tick_params("x", labelrotation=45)
    axes.legend(fontsize="small")
    return figure


def draw(found: Mapping[str, Any], folder: pathlib.Path) -> dict[str, list[str]]:
    """Draws all plots of the measurements.

    Args:
        found: `found[program]` are that program's results.
        folder: The folder of the files; made if absent.

    Returns:
        By program, the names of the files.
    """
    figures: dict[str, dict[str, pyplot.Figure]] = {}
    if scaling.NAME in found:
        of_steps = found[scaling.NAME]
        figures[scaling.NAME] = {f"steps-{w}": steps(of_steps, w) for w in of_steps}
    if allreduce.NAME in found:
        figures[allreduce.NAME] = {"allreduce": bandwidth(found[allreduce.NAME])}
    if build.NAME in found:
        of_build = found[build.NAME]
        figures[build.NAME] = {f"build-{n}": builds(of_build, n) for n in of_build}
    folder.mkdir(parents=True, exist_ok=True)
    for by_name in figures.values():
        for name, figure in by_name.items():
            # Equal figures give equal bytes: no date, and no random ids.
            with matplotlib.rc_context({"svg.hashsalt": "replicator"}):
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)
    return {
        program: [f"{name}.svg" for name in by_name]
        for program, by_name in figures.items()
    }
