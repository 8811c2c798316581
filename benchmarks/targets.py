"""What Replicator shall reach, and whether it did: the first table of RESULTS.md.

Each target bounds a ratio of times or bytes that were measured in one run, on two cores
with two replicas unless it says otherwise. It is reached if one way of setting up a
Replicator reaches it; which one is to be seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks import allreduce, build, memory, steps, timing
from benchmarks.contenders import BASELINE, CLONED, OURS, RIVAL, SHARDED
from benchmarks.tables import Table

# [workload]: of one device at most, times faster than MirroredStrategy at least.
STEPS = {
    "small": (1.25, 2.0),
    "large": (1.10, 1.5),
    "deep": (1.15, 1.8),
    "resnet20": (1.00, 1.05),
    "lstm": (1.05, 1.2),
    "wide": (1.3, 8.0),
}
ALL_REDUCE = ("64MiB", 3.5)
# 100 layers, 32 replicas: times faster. step_fn is called for each replica, or for two.
BUILD = {"default": ((OURS, SHARDED), 2.2), "clone": ((CLONED,), 6.0)}
FURTHER = 0.2  # what cloning one more replica may cost, of the first one's build
PASSES = 0.05  # of the default build, at 32 replicas
LINEAR = 1.25  # of the passes' time per replica, at 128 replicas and at 32
MEMORY = 0.55

VARIANTS = (OURS, SHARDED, CLONED)


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound, and what was measured.

    Attributes:
        what: Is bounded.
        bound: The largest value that will do; or the smallest.
        values: By variant, what was measured; none if nothing was.
        at_most: Whether the bound is the largest value that will do.
    """

    what: str
    bound: float
    values: Mapping[str, float]
    at_most: bool = True

    @property
    def reached(self) -> bool | None:
        """Whether a variant reached it; None if none was measured."""
        if not self.values:
            return None
        values = self.values.values()
        return min(values) <= self.bound if self.at_most else max(values) >= self.bound


def judge(found: Mapping[str, Any]) -> list[Target]:
    """Returns all targets, with what was measured.

    Args:
        found: `found[program]` are that program's results, if it has run.
    """
    return [
        *_steps(found.get(steps.NAME, {})),
        _all_reduce(found.get(allreduce.NAME, {})),
        *_build(found.get(build.NAME, {})),
        *_memory(found.get(memory.NAME, {})),
    ]


def _steps(found: Mapping[str, Any]) -> list[Target]:
    targets = []
    for name, (of_one, times) in STEPS.items():
        measured = steps.from_json(found.get(name, {}))
        ours = [v for v in VARIANTS if v in measured]
        one = {v: timing.ratio(measured[v], measured[BASELINE]) for v in ours}
        rival = {v: timing.ratio(measured[RIVAL], measured[v]) for v in ours}
        title = steps.NAMES[name].title
        targets += [
            Target(f"{title}: step, of one device's", of_one, one),
            Target(f"{title}: times faster than {RIVAL}", times, rival, False),
        ]
    return targets


def _all_reduce(found: Mapping[str, Any]) -> Target:
    size, times = ALL_REDUCE
    measured = steps.from_json(found.get(size, {}))
    values = {OURS: timing.ratio(measured[RIVAL], measured[OURS])} if measured else {}
    what = f"all-reduce of {size}: times faster than {RIVAL}"
    return Target(what, times, values, False)


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
            {SHARDED: found[SHARDED][kind] / found[OURS][kind]}
            if {OURS, SHARDED} <= set(found)
            else {},
        )
        for kind in ("counted", "resident")
    ]


def table(targets: list[Target]) -> Table:
    """Returns the table of all targets."""
    said = {None: "not measured", True: "yes", False: "**no**"}
    rows = []
    for target in targets:
        wanted = f"{'at most' if target.at_most else 'at least'} {target.bound:.2f}"
        values = target.values
        cells = [f"{values[v]:.2f}" if v in values else "" for v in VARIANTS]
        rows.append([target.what, wanted, *cells, said[target.reached]])
    return Table(
        "Targets",
        ["", "wanted", *VARIANTS, "reached"],
        rows,
        "Two replicas unless said. Reached, if by one of the columns.",
    )
