# SPDX-License-Identifier: Apache-2.0
"""Measures the rates of a machine, and all_reduce by each algorithm.

A busy machine makes everything slower, but nothing faster. Therefore each time is the
minimum over several rounds, in which the contenders take turns.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator.costs import cost, hosts, rates
from replicator.primitives import arithmetic
from replicator.replicator import Replicator
from replicator.report import files

# In a chain, so that the variation of the call's overhead is negligible. An op takes a
# tenth of a microsecond, a message some microseconds.
_TINY_OPS = 1000
_TINY_HOPS = 200
_LARGE_OPS = 8
_LARGE = 1 << 24  # bytes: large enough to leave the caches of most machines
_LEAST_SECONDS = 0.02  # minimum duration of a contender's round, or of one call
_WIDTH = 150  # columns of the tables where no terminal sets a width

Function = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of an all_reduce of one size on some replicas, in seconds.

    Attributes:
        replicas: The number of replicas.
        nbytes: The size of each replica's tensor.
        none: The time of the step without communication.
        measured: The additional time with it, by algorithm.
        expected: The time predicted by the model, by algorithm.
    """

    replicas: int
    nbytes: int
    none: float
    measured: Mapping[str, float]
    expected: Mapping[str, float]


def measure_rates(
    names: Sequence[str], rounds: int, large: int = _LARGE
) -> rates.Rates:
    """Measures the rates of devices of one kind.

    Args:
        names: At least two devices, by their full names.
        rounds: The number of measurements of each.
        large: The size of large tensors, in bytes.
    """
    times = shortest(_chains(names, large), rounds)

    def difference(name: str, baseline: str, count: float) -> float:
        return max(0.0, (times[name] - times[baseline]) / count)

    op = difference("ops", "nothing", _TINY_OPS)
    message = max(0.0, difference("hops", "nothing", _TINY_HOPS) - op)
    per_byte = 1 / (_LARGE_OPS * large)
    sent = difference("large hops", "large", 1) - _LARGE_OPS * (op + message)
    return rates.Rates(
        op=op,
        message=message,
        # Passing a reference costs the same for every size; differences are noise.
        link=0.0 if rates.kind_of(names) == "cpu" else max(0.0, sent) * per_byte,
        add=difference("adds", "large", 2) * per_byte,
        copy=difference("copies", "large", 1) * per_byte,
        apart=rates.kind_of(names) != "cpu",
    )


def _chains(names: Sequence[str], large: int) -> dict[str, Function]:
    """Returns functions, by name, whose times differ by one kind of work each.

    Args:
        names: At least two devices, by their full names.
        large: The size of large tensors, in bytes.
    """
    device, other_device = names[:2]
    with tf.device(device):
        tiny, tensor = tf.Variable(1.0), tf.Variable(tf.ones([large // 4]))
        addend = tf.Variable(tf.ones([large // 4]))

    def chain(x: tf.Variable, count: int, step: Callable[[int, Any], Any]) -> Function:
        def body() -> tf.Tensor:
            with tf.device(device):
                value = x.read_value()
                for k in range(count):
                    value = step(k, value)
                return tf.reshape(value, [-1])[0]

        return tf.function(body).get_concrete_function()

    def stay(k: int, x: tf.Tensor) -> tf.Tensor:
        return arithmetic.ensure_shape(x, x.shape)

    def hop(k: int, x: tf.Tensor) -> tf.Tensor:
        with tf.device(device if k % 2 else other_device):
            return arithmetic.ensure_shape(x, x.shape)

    def add(k: int, x: tf.Tensor) -> tf.Tensor:
        return tf.add_n([arithmetic.ensure_shape(x, x.shape), addend.read_value()])

    def copy(k: int, x: tf.Tensor) -> tf.Tensor:
        half = large // 8
        return tf.concat([x[half:], x[:half]], 0)

    return {
        "nothing": chain(tiny, 0, stay),
        "ops": chain(tiny, _TINY_OPS, stay),
        "hops": chain(tiny, _TINY_HOPS, hop),
        "large": chain(tensor, 0, stay),
        "large hops": chain(tensor, _LARGE_OPS, hop),
        "adds": chain(tensor, _LARGE_OPS, add),
        "copies": chain(tensor, _LARGE_OPS, copy),
    }


def measure_algorithms(
    names: Sequence[str], nbytes: int, rounds: int, calibration: rates.Calibration
) -> Timing:
    """Measures all_reduce alone, by each algorithm.

    Args:
        names: Where the replicas run.
        nbytes: The size of each replica's tensor.
        rounds: The number of measurements of each.
        calibration: The rates that the model uses.
    """
    nccl = rates.nccl_reaches(names)
    algorithms = [a for a in cost.ALGORITHM_NAMES if a != "nccl" or nccl]
    times = shortest(
        {None: _step(names, nbytes, None)}
        | {algorithm: _step(names, nbytes, algorithm) for algorithm in algorithms},
        rounds,
    )
    base = times.pop(None)
    return Timing(
        replicas=len(names),
        nbytes=nbytes,
        none=base,
        measured={a: max(0.0, seconds - base) for a, seconds in times.items()},
        expected={a: expected(names, a, nbytes, calibration) for a in algorithms},
    )


def expected(
    names: Sequence[str], algorithm: str, nbytes: int, calibration: rates.Calibration
) -> float:
    """Returns the seconds of an all_reduce according to the model.

    Args:
        names: Where the replicas run.
        algorithm: One of cost.ALGORITHM_NAMES.
        nbytes: The size of each replica's tensor.
        calibration: The rates of work.
    """
    if not hosts.in_levels(names):
        kind = rates.kind_of(names)
        return calibration.seconds(algorithm, kind, len(names), nbytes)
    members = hosts.by_host(names)
    most = max(members, key=len)
    kind = rates.kind_of([names[n] for n in most])
    return calibration.seconds_in_levels(
        algorithm, kind, len(most), len(members), nbytes
    )


def _step(names: Sequence[str], nbytes: int, algorithm: str | None) -> Function:
    """Returns a step that reduces one tensor per replica, or nothing."""
    repl = Replicator(names, algorithm=algorithm)
    with repl.context():
        variable = tf.Variable(tf.ones([max(1, nbytes // 4)]))

    def step_fn() -> tf.Tensor:
        x = variable.read_value()
        return (x if algorithm is None else repl.all_reduce(x))[0]

    return repl.build(step_fn)


def shortest(functions: Mapping[Any, Function], rounds: int) -> dict[Any, float]:
    """Returns the minimum seconds of a call of each function; they take turns.

    Args:
        functions: Functions that return tensors, or nests of them.
        rounds: The number of measurements of each.
    """
    for function in functions.values():
        function()  # traces and builds
    best = dict.fromkeys(functions, math.inf)
    for _ in range(rounds):
        for name, function in functions.items():
            end = time.perf_counter() + _LEAST_SECONDS
            while True:
                start = time.perf_counter()
                for tensor in tf.nest.flatten(function()):
                    tensor.numpy()
                now = time.perf_counter()
                best[name] = min(best[name], now - start)
                if now >= end:
                    break
    return best


def show(
    calibration: rates.Calibration,
    timings: Sequence[Timing],
    names: Mapping[str, str] | None = None,
) -> None:
    """Prints rates and timings as tables.

    Args:
        calibration: The rates.
        timings: The timings.
        names: The names of hosts, by the names that `hosts.host_of` returns.

    Raises:
        DependencyError: rich is not installed.
    """
    with files.needing("rich", "print a calibration"):
        import rich.table

        from replicator.report import display, units
    console = display.new_console(_WIDTH)

    def grid(title: str, *columns: str) -> rich.table.Table:
        table = display.new_table(title)
        for column in columns:
            table.add_column(column, justify="right")
        return table

    for kind, measured in calibration.rates.items():
        costs = grid(f"What work costs ({kind})", "work", "costs")
        for name in ("op", "message"):
            costs.add_row(name, f"{getattr(measured, name) * 1e6:.2f} us")
        for name in ("link", "add", "copy"):
            costs.add_row(name, _per_second(getattr(measured, name)))
        console.print(costs)
    if calibration.links:
        links = grid("Links between hosts", "hosts", "message", "link")
        for ends, link_rates in calibration.links.items():
            host_names = sorted((names or {}).get(end, end) for end in ends)
            message = f"{link_rates.message * 1e6:.2f} us"
            links.add_row(" - ".join(host_names), message, _per_second(link_rates.link))
        console.print(links)
    algorithms = list(timings[0].measured) if timings else []
    title = "all_reduce alone, ms, and what the model says"
    times = grid(title, "replicas", "bytes", *algorithms, "chosen")
    for timing in timings:
        times.add_row(
            str(timing.replicas),
            units.size(timing.nbytes),
            *(
                f"{timing.measured[a] * 1e3:.3f} ({timing.expected[a] * 1e3:.3f})"
                for a in algorithms
            ),
            min(algorithms, key=timing.expected.__getitem__),
        )
    console.print(times)


def _per_second(rate: float) -> str:
    return f"{1e-9 / rate:.1f} GB/s" if rate else "nothing"
