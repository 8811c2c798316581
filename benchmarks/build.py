# SPDX-License-Identifier: Apache-2.0
"""The time until a step's first result: `python -m benchmarks.build`.

Measured over the number of replicas; each build runs in its own process, since the
number of logical devices is fixed at its start, and TensorFlow's caches from one build
would speed up the next. Replicator's builds are broken down into the user's step_fn,
Replicator's work around it (matching, lowering, rewiring and so on), TensorFlow's
conversion of the graph to a function, and the first run with its placement, pruning and
partitioning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import tensorflow as tf
from absl import app, flags

import replicator
from benchmarks import cli, contenders, networks, results, workloads
from benchmarks.contenders import BASELINE, CLONED, MIRRORED, OPTIONS, OURS, RIVAL
from benchmarks.tables import Table
from replicator._tf.fast import tracing
from replicator.graph.order import ordering
from replicator.step import building

_COUNTS = flags.DEFINE_list(
    "build_counts", None, "Numbers of replicas; by default enough for each network."
)

NAME = "build"
# (network, contender, numbers of replicas) of the builds.
PLANS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "deep": {
        BASELINE: (1,),
        RIVAL: (2, 8, 32),
        OURS: (1, 2, 8, 32),
        MIRRORED: (32,),
        CLONED: (1, 2, 8, 32),
    },
    "small": {
        BASELINE: (1,),
        OURS: (8, 32, 128),
        CLONED: (8, 32, 128, 512),
    },
}
QUICK = {"small": {BASELINE: (1,), RIVAL: (2,), OURS: (1, 2), CLONED: (1, 2)}}
PER_REPLICA_BATCH = 4  # the cost of a step does not matter here


@dataclasses.dataclass(frozen=True)
class Built:
    """The duration of a build, in seconds.

    Attributes:
        trace: Until the function is traced.
        first_run: The first run of the traced function.
        step_fn: The part of `trace` spent in step_fn; None if not measured.
        passes: The part of `trace` spent in Replicator's own work.
    """

    trace: float
    first_run: float
    step_fn: float | None = None
    passes: float | None = None

    @property
    def total(self) -> float:
        """The time until the first result."""
        return self.trace + self.first_run


class Stopwatch:
    """Adds up the run time of a function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the same function, timed."""

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def build(trace: Callable[[], Any], run: Callable[[], Any]) -> Built:
    """Traces a step and runs it once."""
    start = time.perf_counter()
    trace()
    traced = time.perf_counter()
    float(run())
    return Built(traced - start, time.perf_counter() - traced)


def build_function(function: Any) -> Built:
    """Traces a tf.function without arguments and runs it once."""
    return build(function.get_concrete_function, function)


def build_replicated(
    workload: workloads.Workload, replicas: int, **options: Any
) -> Built:
    """Builds with Replicator, and breaks down the time."""
    repl = replicator.Replicator(contenders.devices(replicas), **options)
    with repl.context():
        model = workload.make_model()
        optimizer = repl.wrap_optimizer(workloads.make_optimizer(workload, model))
    parts = workload.parts(replicas)
    in_step_fn, in_build, around_it = Stopwatch(), Stopwatch(), Stopwatch()

    def input_fn(ctx: replicator.InputContext) -> workloads.Batch:
        with tf.device(repl.devices[ctx.replica_id]):
            return tf.nest.map_structure(tf.constant, parts[ctx.replica_id])

    def step_fn(batch: workloads.Batch) -> tf.Tensor:
        return repl.all_reduce(workloads.train_step(model, optimizer, batch), "mean")

    step = repl.build(in_step_fn.around(step_fn), input_fn)
    watched = {
        (building, "build_step"): in_build,
        (ordering, "order_as_created"): around_it,
        (tracing, "_leave_out_unused"): around_it,
    }
    with contextlib.ExitStack() as stack:
        for (module, name), watch in watched.items():
            around = watch.around(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, around))
        total = build(lambda: step.plan, lambda: step()[0])
    return dataclasses.replace(
        total,
        step_fn=in_step_fn.seconds,
        passes=in_build.seconds - in_step_fn.seconds + around_it.seconds,
    )


def measure(network: str, name: str, replicas: int) -> Built:
    """Measures one build in this process, which must not have built anything before."""
    tiny = workloads.Workload(
        "", "", networks.Perceptron(2, 2, 1), workloads.mlp, replicas, 1
    )
    for warm_up in (contenders.one_device, contenders.replicated):
        warm_up(tiny, 1, contenders.initial_weights(tiny))()  # initializes everything
    workload = {w.name: w for w in workloads.WORKLOADS}[network]
    workload = dataclasses.replace(workload, batch=PER_REPLICA_BATCH * replicas)
    if name in OPTIONS:
        return build_replicated(workload, replicas, **OPTIONS[name])
    factory = contenders.factories()[name]
    weights = contenders.initial_weights(workload)
    return build_function(factory(workload, replicas, weights))


def plan(counts: list[int] | None) -> list[tuple[str, str, int]]:
    """Returns the builds to run: (network, contender, number of replicas)."""
    return [
        (network, name, count)
        for network, by_name in (QUICK if cli.QUICK.value else PLANS).items()
        for name, by_default in by_name.items()
        for count in (by_default if counts is None or len(by_default) == 1 else counts)
        if name in (BASELINE, RIVAL) or name in OPTIONS
    ]


def from_json(by_count: Mapping[str, Any]) -> dict[int, Built]:
    """Returns the builds of one contender, by number of replicas."""
    return {int(count): Built(**fields) for count, fields in by_count.items()}


def further(builds: Mapping[int, Built]) -> float | None:
    """Returns the cost of each further replica, as a share of the first's build.

    Args:
        builds: The builds of one contender, by number of replicas.
    """
    most = max(builds)
    least = min((count for count in builds if count > 1), default=most)
    if 1 not in builds or least == most:
        return None
    more = builds[most].total - builds[least].total
    return more / (most - least) / builds[1].total


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Returns a table for each network, and one that breaks down Replicator's time.

    Args:
        found: `found[network][contender][replicas]` is a Built as a dict.
    """
    result = []
    shares = []
    for network, by_name in found.items():
        builds = {name: from_json(by_count) for name, by_count in by_name.items()}
        counts = sorted({count for by_count in builds.values() for count in by_count})
        rows = []
        for name, by_count in builds.items():
            cells = [
                f"{by_count[n].total:.1f}" if n in by_count else "" for n in counts
            ]
            share = further(by_count)
            rows.append([name, *cells, "" if share is None else f"{share:.2f}"])
            shares += [
                [f"{network}, {name}, {count}", *_shares(build, count)]
                for count, build in by_count.items()
                if build.passes is not None
            ]
        result.append(
            Table(
                f"Until the first result, {network} MLP, in s",
                ["replicas", *map(str, counts), "each further / first"],
                rows,
            )
        )
    parts = ["step_fn", "Replicator", "tf.function", "first run"]
    last = ["Replicator / all", "Replicator, ms per replica"]
    heading = ["network, contender, replicas", *parts, *last]
    title = "Where the time of a build goes, in s"
    return [*result, Table(title, heading, shares)]


def _shares(built: Built, count: int) -> list[str]:
    step_fn, passes = built.step_fn or 0.0, built.passes or 0.0
    parts = (step_fn, passes, built.trace - step_fn - passes, built.first_run)
    return [
        *(f"{part:.2f}" for part in parts),
        f"{passes / built.total:.1%}",
        f"{passes / count * 1e3:.0f}",
    ]


def _measure_cell(cell: str) -> None:
    """Measures NETWORK/CONTENDER/REPLICAS and prints it as JSON."""
    network, name, count = cell.split("/")
    tf.get_logger().setLevel("ERROR")
    contenders.split_cpu(int(count))
    print(json.dumps(dataclasses.asdict(measure(network, name, int(count)))))


def main(argv: list[str]) -> None:
    """Measures all builds, prints the tables and writes the JSON file."""
    cli.refuse_arguments(argv)
    if cli.CELL.value is not None:
        _measure_cell(cli.CELL.value)
        return
    counts = cli.numbers("build_counts", _COUNTS.value)
    names = cli.chosen(PLANS)
    about = results.facts()
    measurements: dict[str, Any] = {}
    for network, name, count in plan(counts):
        if network in names:
            cli.progress(f"build: {network} MLP, {name} on {count} ...")
            cell = cli.apart("benchmarks.build", f"--cell={network}/{name}/{count}")
            measurements.setdefault(network, {}).setdefault(name, {})[str(count)] = cell
    cli.finish(NAME, about, measurements, tables(measurements))


if __name__ == "__main__":
    app.run(main)
