# SPDX-License-Identifier: Apache-2.0
"""The plots of RESULTS.md, drawn with matplotlib."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from benchmarks import allreduce, build, scaling, steps, timing

# One color per contender in all plots.
_COLORS = tuple(f"C{number}" for number in range(10))

# README.md shows the plot of networks, on pages that are light or dark: its ink, its
# paper and its lines are other colors in dark ones.
_INK, _PAPER, _LINE = "#1f2933", "#fbfcfd", "#c9d1d9"
_DARK = {_INK: "#e3e8ee", _PAPER: "#14181d", _LINE: "#3a434d"}
_BARS = {"MirroredStrategy": "#d98a1f", "Replicator": "#2f76d2"}


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


def networks(found: Mapping[str, Any]) -> pyplot.Figure:
    """Returns the step times of all networks, relative to one device.

    Args:
        found: Results of benchmarks.steps, with one setting of oneDNN.
    """
    figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
    for shift, (name, color) in zip((-0.2, 0.2), _BARS.items(), strict=True):
        places = [row + shift for row in range(len(found))]
        ratios = [
            timing.ratio(
                *(timing.Measured.from_json(m[n]) for n in (name, "one device"))
            )
            for m in found.values()
        ]
        bars = axes.barh(places, ratios, 0.36, color=color, label=name)
        axes.bar_label(bars, fmt="%.2f", padding=-28, color="white", fontsize=9)
    axes.axvline(1.0, color=_INK, linewidth=1, zorder=0.8, label="one device")
    titles = [steps.NAMES[workload].title for workload in found]
    axes.set_yticks(range(len(found)), titles, color=_INK)
    axes.set_xlabel("time of a step, one device = 1; shorter is better", color=_INK)
    axes.tick_params(colors=_INK, length=0)
    axes.invert_yaxis()
    axes.grid(axis="x", color=_LINE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.legend(labelcolor=_INK, frameon=False, loc="upper right")
    axes.margins(x=0.12)
    figure.set_facecolor(_PAPER)
    axes.set_facecolor(_PAPER)
    return figure


def light_and_dark(svg: str) -> str:
    """Lets a browser choose the colors of an SVG that is drawn in those of light pages.

    Args:
        svg: What matplotlib wrote.
    """
    light = "".join(f"--c{k}: {color};" for k, color in enumerate(_DARK))
    dark = "".join(f"--c{k}: {color};" for k, color in enumerate(_DARK.values()))
    for k, color in enumerate(_DARK):
        svg = svg.replace(color, f"var(--c{k})")
    style = (
        f"<style>:root {{{light}}} "
        f"@media (prefers-color-scheme: dark) {{:root {{{dark}}}}}</style>\n <metadata>"
    )
    return svg.replace("<metadata>", style, 1)


def step_times(found: Mapping[str, Any], workload: str) -> pyplot.Figure:
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
    if "on" in found.get(steps.NAME, {}):
        figures[steps.NAME] = {"networks": networks(found[steps.NAME]["on"])}
    if scaling.NAME in found:
        of_steps = found[scaling.NAME]
        figures[scaling.NAME] = {
            f"steps-{w}": step_times(of_steps, w) for w in of_steps
        }
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
    if steps.NAME in figures:
        path = folder / "networks.svg"
        path.write_text(light_and_dark(path.read_text()))
    return {
        program: [f"{name}.svg" for name in by_name]
        for program, by_name in figures.items()
    }
