# SPDX-License-Identifier: Apache-2.0
"""Replicator's performance targets and whether it meets them: RESULTS.md's first table.

Each target bounds a ratio of times or bytes that were measured in one run, on two cores
with two replicas unless stated otherwise. A Replicator with default options has to meet
it; other variants are shown beside it. Steps and epochs are judged with TensorFlow's
oneDNN kernels and without, since the default depends on the processor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks import (
    at_work,
    build,
    doors,
    embedding,
    fit,
    hosts,
    memory,
    normalization,
    profile,
    steps,
    strategies,
    timing,
)
from benchmarks.contenders import (
    BASELINE,
    CLONED,
    MIRRORED,
    ONE_REPLICA,
    OURS,
    RIVAL,
)
from benchmarks.tables import Table

# [workload]: at most this multiple of one device, and of Replicator with one replica;
# at least this many times faster than MirroredStrategy.
STEPS = {
    "small": (0.85, 1.2, 2.4),
    "large": (0.85, 1.1, 2.0),
    "deep": (1.05, 1.2, 1.9),
    "resnet20": (0.97, 1.1, 1.02),
    "lstm": (1.00, 1.1, 1.4),
    "wide": (1.1, 1.1, 12.0),
}
# With work before and after it: at most this multiple of the same work on one device,
# also if TensorFlow does not merge the sums there; at least this many times faster than
# MirroredStrategy.
ALL_REDUCE = ("64MiB", 1.15, 1.1, 2.0)
# 100 layers, 32 replicas: times faster. step_fn is called for each replica, or for two.
BUILD = {"default": ((OURS, MIRRORED), 2.2), "clone": ((CLONED,), 6.0)}
FURTHER = 0.2  # the cost of cloning one more replica, relative to the first's build
PASSES = 0.05  # of the default build, at 32 replicas
LINEAR = 1.25  # the passes' time per replica, at 128 replicas relative to 32
MEMORY = 0.55
# An epoch of Keras' fit: at most these multiples of plain Keras and MirroredStrategy.
FIT = (1.05, 0.8)
# A step of fit with statistics of the whole batch, relative to local ones.
STATISTICS = 1.1
# The largest error of a predicted step.
PREDICTED = 0.15
# Auto's choice: at most this multiple of the fastest builder's step.
AUTO = 1.05
# Large embeddings in parts, relative to the step with whole variables on owners.
PARTS = 1.2
# The first result through AutoDist's doors, 32 replicas, relative to cloning.
DOORS = 1.0
# The large MLP on two hosts at 1 Gbit/s: at most this multiple of one remote device,
# at least this many times faster than torch.
HOSTS = (2.2, 5.0)
# All-reduce between hosts: the link, the size, the reference, the bound.
HOSTS_SUMS = (
    (hosts.WIRE, "64MiB", hosts.SOCKETS, 1.15),
    (hosts.LOOPBACK, "64MiB", hosts.GLOO, 1.5),
    (hosts.LOOPBACK, "4KiB", hosts.GLOO, 3.0),
)
# The same with a program on each host: times faster than torch, and all-reduce.
BETWEEN = 4.0
BETWEEN_SUMS = (
    (hosts.WIRE, "64MiB", hosts.SOCKETS, 1.15),
    (hosts.LOOPBACK, "64MiB", hosts.GLOO, 1.5),
    (hosts.LOOPBACK, "4KiB", hosts.GLOO, 2.0),
)

VARIANTS = (OURS, MIRRORED, CLONED)


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound, and the measured values.

    Attributes:
        what: The quantity that is bounded.
        bound: The largest acceptable value; or the smallest.
        values: By variant, the measured value; empty if not measured. The first is
            judged.
        at_most: Whether the bound is the largest acceptable value.
    """

    what: str
    bound: float
    values: Mapping[str, float]
    at_most: bool = True

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None if nothing was measured."""
        for value in self.values.values():
            return value <= self.bound if self.at_most else value >= self.bound
        return None


def judge(found: Mapping[str, Any]) -> list[Target]:
    """Returns all targets with their measurements.

    Args:
        found: `found[program]` are that program's results, if it has run.
    """
    return [
        *_steps(found.get(steps.NAME, {})),
        *_all_reduce(found.get(at_work.NAME, {})),
        *_build(found.get(build.NAME, {})),
        *_memory(found.get(memory.NAME, {})),
        *_fit(found.get(fit.NAME, {})),
        *_statistics(found.get(normalization.NAME, {})),
        *_predicted(found.get(profile.NAME, {})),
        *_doors(found.get(doors.NAME, {})),
        *_auto(found.get(strategies.NAME, {})),
        *_parts(found.get(strategies.NAME, {}), found.get(embedding.NAME, {})),
        *_hosts(found.get(hosts.NAME, {})),
    ]


def _steps(found: Mapping[str, Any]) -> list[Target]:
    targets = []
    for setting in steps.SETTINGS:
        by_workload = found.get(setting, {})
        for name, (of_one, of_replica, times) in STEPS.items():
            measured = steps.from_json(by_workload.get(name, {}))
            title = f"{steps.NAMES[name].title}, oneDNN {setting}"
            targets += [
                Target(f"{title}: of one device", of_one, _of(measured, BASELINE)),
                Target(
                    f"{title}: of one replica", of_replica, _of(measured, ONE_REPLICA)
                ),
                _faster(title, times, measured),
            ]
    return targets


def _of(measured: Mapping[str, timing.Measured], other: str) -> dict[str, float]:
    """Returns the ratio of each variant's time to another contender's."""
    variants = [v for v in VARIANTS if v in measured and other in measured]
    return {v: timing.ratio(measured[v], measured[other]) for v in variants}


def _faster(
    title: str, times: float, measured: Mapping[str, timing.Measured]
) -> Target:
    variants = [v for v in VARIANTS if v in measured]
    values = {v: timing.ratio(measured[RIVAL], measured[v]) for v in variants}
    return Target(f"{title}: times faster than {RIVAL}", times, values, False)


def _all_reduce(found: Mapping[str, Any]) -> list[Target]:
    size, of_one, of_three_sums, times = ALL_REDUCE
    measured = steps.from_json(found.get(size, {}))
    title = f"all-reduce of {size} between other work"
    unmerged = _of(measured, at_work.THREE_SUMS)
    return [
        Target(f"{title}: of one device", of_one, _of(measured, BASELINE)),
        Target(f"{title}: of {at_work.THREE_SUMS}", of_three_sums, unmerged),
        _faster(title, times, measured),
    ]


def _build(found: Mapping[str, Any]) -> list[Target]:
    deep, small = (
        {name: build.from_json(one) for name, one in found.get(network, {}).items()}
        for network in ("deep", "small")
    )
    rival = deep.get(RIVAL, {}).get(32)
    targets = []
    for kind, (names, times) in BUILD.items():
        ours = {name: deep.get(name, {}).get(32) for name in names}
        values = {
            name: rival.total / built.total
            for name, built in ours.items()
            if rival and built
        }
        what = f"build, 100 layers, 32 replicas, {kind}: times faster than {RIVAL}"
        targets.append(Target(what, times, values, False))
    share = build.further(deep[CLONED]) if CLONED in deep else None
    targets.append(
        Target(
            "build, 100 layers: each further cloned replica, of the first",
            FURTHER,
            {} if share is None else {CLONED: share},
        )
    )
    passes = {
        network: {count: one.passes for count, one in by_name.get(OURS, {}).items()}
        for network, by_name in (("deep", deep), ("small", small))
    }
    at_32 = passes["deep"].get(32)
    values = {OURS: at_32 / deep[OURS][32].total} if at_32 else {}
    what = "build, 100 layers, 32 replicas: Replicator's passes, of all"
    targets.append(Target(what, PASSES, values))
    few, many = passes["small"].get(32), passes["small"].get(128)
    values = {OURS: (many / 128) / (few / 32)} if few and many else {}
    what = "build, small MLP: passes per replica, with 128 of that with 32"
    return [*targets, Target(what, LINEAR, values)]


def _memory(found: Mapping[str, Any]) -> list[Target]:
    return [
        Target(
            f"variables and Adam's slots, {kind} bytes, of mirrored's",
            MEMORY,
            {OURS: found[OURS][kind] / found[MIRRORED][kind]}
            if {OURS, MIRRORED} <= set(found)
            else {},
        )
        for kind in ("counted", "resident")
    ]


def _fit(found: Mapping[str, Any]) -> list[Target]:
    targets = []
    for setting in steps.SETTINGS:
        for name in fit.BATCHES:
            measured = steps.from_json(found.get(setting, {}).get(name, {}))
            title = f"epoch of fit, {steps.NAMES[name].title}, oneDNN {setting}"
            targets += [
                Target(f"{title}: of {other}", bound, _fastest(measured, other))
                for other, bound in zip((BASELINE, RIVAL), FIT, strict=True)
            ]
    return targets


def _fastest(measured: Mapping[str, timing.Measured], other: str) -> dict[str, float]:
    if not {OURS, other} <= set(measured):
        return {}
    return {OURS: measured[OURS].fastest / measured[other].fastest}


def _statistics(found: Mapping[str, Any]) -> list[Target]:
    targets = []
    for setting in steps.SETTINGS:
        for size in map(str, normalization.SIZES):
            measured = found.get(setting, {}).get(size)
            title = f"{steps.NAMES['resnet20'].title}, {size} examples"
            what = f"step of fit, {title}, oneDNN {setting}: of {normalization.LOCAL}"
            clock = normalization.WALL
            values = {OURS: normalization.ratio(measured, clock)} if measured else {}
            targets.append(Target(what, STATISTICS, values))
    return targets


def _predicted(found: Mapping[str, Any]) -> list[Target]:
    targets = []
    for name, workload in profile.NAMES.items():
        off = {n: abs(profile.error(own)) for n, own in found.get(name, {}).items()}
        values = {OURS: max(off.values())} if off else {}
        title = f"predicted step, {workload.title}: off by"
        targets.append(Target(title, PREDICTED, values))
    return targets


def _auto(found: Mapping[str, Any]) -> list[Target]:
    targets = []
    for setting in steps.SETTINGS:
        for name, workload in strategies.NETWORKS.items():
            measured = strategies.from_json(found.get(setting, {}).get(name, {}))
            values = {}
            if strategies.AUTO in measured:
                least = measured[strategies.fastest(measured)]
                values = {OURS: timing.ratio(measured[strategies.AUTO], least)}
            title = f"strategy Auto, {workload.title}, oneDNN {setting}"
            targets.append(Target(f"{title}: of the fastest builder", AUTO, values))
    return targets


def _doors(found: Mapping[str, Any]) -> list[Target]:
    by_name = found.get("32", {})
    title = "build, 100 layers, 32 replicas"
    targets = []
    for name in (doors.SESSION, doors.FUNCTION):
        values = {OURS: by_name[name] / by_name[doors.CLONED]} if by_name else {}
        targets.append(Target(f"{title}, {name}: of cloning", DOORS, values))
    return targets


def _parts(wide: Mapping[str, Any], adam: Mapping[str, Any]) -> list[Target]:
    targets = []
    parts, whole = embedding.PARTS, embedding.WHOLE
    for setting in steps.SETTINGS:
        for title, found in (
            (steps.NAMES["wide"].title, wide.get(setting, {}).get("wide", {})),
            (embedding.WORKLOAD.title, adam.get(setting, {})),
        ):
            measured = strategies.from_json(found)
            what = f"{title}, oneDNN {setting}: {parts}, of {whole}"
            targets.append(Target(what, PARTS, _ratio(measured, parts, whole)))
    return targets


def _hosts(found: Mapping[str, Any]) -> list[Target]:
    of_one, times = HOSTS
    measured = steps.from_json(found.get(hosts.WIRE, {}).get("large", {}))
    title = f"{steps.NAMES['large'].title}, two hosts, {hosts.LINKS[hosts.WIRE]}"
    ours = [v for v in VARIANTS if {v, hosts.DDP} <= set(measured)]
    faster = {v: timing.ratio(measured[hosts.DDP], measured[v]) for v in ours}
    targets = [
        Target(
            f"{title}: of {hosts.ONE_REMOTE}", of_one, _of(measured, hosts.ONE_REMOTE)
        ),
        Target(f"{title}: times faster than {hosts.DDP}", times, faster, False),
    ]
    for link, size, other, bound in HOSTS_SUMS:
        measured = steps.from_json(found.get(link, {}).get(size, {}))
        title = f"all-reduce of {size}, two hosts, {hosts.LINKS[link]}: of {other}"
        targets.append(Target(title, bound, _of(measured, other)))
    return [*targets, *_between(found)]


def _between(found: Mapping[str, Any]) -> list[Target]:
    """Returns the targets for a program on each host; they count as default options."""
    trained = steps.from_json(found.get(hosts.WIRE, {}).get("large", {}))
    title = f"{steps.NAMES['large'].title}, between-graph, {hosts.LINKS[hosts.WIRE]}"
    faster = _ratio(trained, hosts.DDP, hosts.BETWEEN)
    targets = [
        Target(f"{title}: times faster than {hosts.DDP}", BETWEEN, faster, False)
    ]
    for link, size, other, bound in BETWEEN_SUMS:
        measured = steps.from_json(found.get(link, {}).get(size, {}))
        title = f"all-reduce of {size}, between-graph, {hosts.LINKS[link]}: of {other}"
        targets.append(Target(title, bound, _ratio(measured, hosts.BETWEEN, other)))
    return targets


def _ratio(
    measured: Mapping[str, timing.Measured], one: str, other: str
) -> dict[str, float]:
    """Returns the ratio of two contenders, if both were measured."""
    if {one, other} <= set(measured):
        return {OURS: timing.ratio(measured[one], measured[other])}
    return {}


def table(targets: list[Target]) -> Table:
    """Returns the table of all targets."""
    verdicts = {None: "not measured", True: "yes", False: "**no**"}
    rows = []
    for target in targets:
        limit = f"{'at most' if target.at_most else 'at least'} {target.bound:.2f}"
        values = target.values
        cells = [f"{values[v]:.2f}" if v in values else "" for v in VARIANTS]
        rows.append([target.what, limit, *cells, verdicts[target.reached]])
    return Table(
        "Targets",
        ["", "wanted", *VARIANTS, "reached"],
        rows,
        "Two replicas unless said. Reached, if by the first of the columns that has a "
        "figure: that of the default options, or of clones where these are meant.",
    )
