# SPDX-License-Identifier: Apache-2.0
"""Predicts a step on other numbers of replicas, and whether more replicas pay.

Each replica keeps its batch, so R replicas compute R batches per step. Let T_comp be
the time of a step of one replica, and T_sync the additional time of a step of R. The
step does R T_comp of work in T_comp + T_sync: a speed-up of R / (1 + T_sync / T_comp).
It exceeds 1, so that more replicas pay, as long as T_sync / T_comp < R - 1.

Source: Das 2018, Deep Learning at scale: The "torch.distributed" API, inequality (5).
On shared cores, the replicas' computation takes as long as one replica, or as all work
divided among the cores (Brent 1974, The parallel evaluation of general arithmetic
expressions), whichever is longer, times the measured loss through sharing. Work that
one replica does for all, the update of a variable that it owns, takes a constant time.
If only one replica was measured, the loss is unknown: Graham 1969 proves a bound
(Bounds on multiprocessing timing anomalies), and half of that is predicted.

Each prediction has bounds. On shared cores, additional replicas add at least their time
with no core idle, and at most as much per replica as the measured ones. On separate
hosts, a step takes at least the longer of computation and communication, if one hides
the other, and at most their sum. Both bounds are widened by the measured variation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from replicator.costs import cost, rates
from replicator.costs.rates import Calibration, Rates, Work
from replicator.profile.parts import Measured
from replicator.report.rows import Row

MOST_REPLICAS = 64
_UNKNOWN_BYTES = 1 << 10  # as in costs/cost.py
_LEAST_MODELLED = 1e-12  # seconds: a modelled cost of zero cannot be scaled


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A step on some number of replicas.

    Attributes:
        replicas: The number of replicas.
        step: The predicted seconds of a step.
        alone: The seconds of a step of one replica: T_comp.
        low: The lower bound of `step`.
        high: The upper bound of `step`.
    """

    replicas: int
    step: float
    alone: float
    low: float = 0.0
    high: float = math.inf

    @property
    def sync(self) -> float:
        """T_sync: the seconds that a step takes longer than one replica alone."""
        return max(0.0, self.step - self.alone)

    @property
    def ratio(self) -> float:
        """T_sync / T_comp."""
        return self.sync / self.alone

    @property
    def speed_up(self) -> float:
        """The throughput in examples, relative to one replica."""
        return self.replicas * self.alone / self.step

    @property
    def pays(self) -> bool:
        """Whether the throughput exceeds that of one replica."""
        return self.ratio < self.replicas - 1


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Which numbers of replicas pay, of 2 to MOST_REPLICAS.

    Attributes:
        best: The number with the greatest speed-up; 1 if none pays.
        speed_up: That speed-up.
        stops: The smallest number from which on none pays; None if there is none.
        starts: The smallest number that pays; None if there is none.
    """

    best: int
    speed_up: float
    stops: int | None
    starts: int | None


def verdict(predicted: Sequence[Predicted]) -> Verdict:
    """Finds which numbers of replicas pay.

    Args:
        predicted: The predictions for 1, 2, 3, ... replicas.
    """
    best = max(
        predicted, key=lambda prediction: (prediction.speed_up, -prediction.replicas)
    )
    stops = None
    for prediction in reversed(predicted):
        if prediction.replicas == 1 or prediction.pays:
            break
        stops = prediction.replicas
    starts = next(
        (prediction.replicas for prediction in predicted if prediction.pays), None
    )
    return Verdict(best.replicas, best.speed_up, stops, starts)


def on_these_devices(
    measured: Measured, replicas: int, calibration: Calibration
) -> Predicted:
    """Predicts a step on `replicas` devices like those measured.

    Args:
        measured: The measurement.
        replicas: The number of replicas.
        calibration: The rates of work.
    """
    alone, measured_count = measured.alone, measured.replicas
    if replicas == 1:
        return _between(measured, 1, alone, (alone, alone))
    kind = rates.kind_of(measured.devices)
    waits = sum(
        _scaled(seconds, row, measured_count, replicas, kind, calibration)
        for seconds, row in zip(measured.communication, measured.rows, strict=True)
    )
    lost = _lost(measured, replicas)
    step = (
        measured.fixed + measured.once + _computing(measured, replicas) + lost + waits
    )
    if measured.cores is None or replicas == measured_count:
        bounds = step, step
    elif measured_count == 1:
        bounds = step - lost, replicas * alone + waits
    elif replicas < measured_count:
        bounds = alone, measured.step
    else:
        more = (step - measured.step) * measured.busy
        bounds = measured.step + more, measured.step * replicas / measured_count
    return _between(measured, replicas, step, bounds)


def _between(
    measured: Measured, replicas: int, step: float, bounds: tuple[float, float]
) -> Predicted:
    """Returns a prediction within its bounds, widened by the measured variation."""
    low, high = min(step, *bounds), max(step, *bounds)
    wider = 1 + measured.spread
    return Predicted(replicas, step, measured.alone, low / wider, high * wider)


def on_several_hosts(
    measured: Measured, replicas: int, calibration: Calibration, network: Rates
) -> Predicted:
    """Predicts a step on hosts like this one, with one replica each.

    Args:
        measured: The measurement.
        replicas: The number of replicas.
        calibration: The rates of work.
        network: The rates between hosts.
    """
    between = dataclasses.replace(
        calibration, rates={**calibration.rates, "hosts": network}, links={}
    )
    waits = 0.0
    if replicas > 1:
        for row in measured.rows:
            count = _participants(row, measured.replicas, replicas)
            waits += modelled(row, count, "hosts", between)
    alone = measured.alone
    hidden = max(alone, waits)
    return _between(measured, replicas, alone + waits, (hidden, alone + waits))


def modelled(row: Row, count: int, kind: str, calibration: Calibration) -> float:
    """Returns the seconds of a communication, according to the calibration.

    Its small tensors share messages; it sends one at least.

    Args:
        row: The communication.
        count: The number of participating replicas.
        kind: One of rates.KINDS.
        calibration: The rates of work.
    """
    if count < 2:
        return 0.0
    sizes = [_nbytes(value) for value in row.operands[0]] if row.operands else []
    times = 1 if row.times is None else row.times
    empty = _of_tensor(row, 0, count, kind, calibration)
    messages = max(1.0, sum(map(cost.filled, sizes)))
    seconds = messages * empty
    for size in sizes:
        seconds += _of_tensor(row, size, count, kind, calibration) - empty
    return times * seconds


def _of_tensor(
    row: Row, nbytes: int, count: int, kind: str, calibration: Calibration
) -> float:
    """Returns the seconds for one tensor in a message of its own."""
    if row.primitive == "all_reduce":
        able = [a for a in cost.ALGORITHM_NAMES if a != "nccl"]
        used = [a for a in able if a in row.algorithm.split(", ")]
        return min(
            calibration.seconds(a, kind, count, nbytes)
            for a in (used if kind != "hosts" and used else able)
        )
    whole, chain = _WORK[row.primitive](count, nbytes)
    kind_rates = calibration.of(kind)
    return (chain if kind_rates.apart else whole).seconds(kind_rates)


def _to_one(r: int, n: int) -> tuple[Work, Work]:
    """Returns the work of receiving from all on one replica, and its longest chain."""
    whole = Work(1, r - 1, (r - 1) * n, r * n)
    return whole, whole


def _from_one(r: int, n: int) -> tuple[Work, Work]:
    whole = Work(r, r - 1, (r - 1) * n)
    return whole, whole


def _gather(r: int, n: int) -> tuple[Work, Work]:
    whole = Work(1, 2 * (r - 1), (r - 1) * n * (1 + r), 0, r * n)
    return whole, whole


def _exchange(r: int, n: int) -> tuple[Work, Work]:
    chain = Work(r, r - 1, (r - 1) * n / r, 0, n)
    return Work(r * r, r * (r - 1), (r - 1) * n, 0, r * n), chain


def _scatter_sums(r: int, n: int) -> tuple[Work, Work]:
    chain = Work(r, r - 1, (r - 1) * n / r, n)
    return Work(r * r, r * (r - 1), (r - 1) * n, r * n), chain


def _one_each(r: int, n: int) -> tuple[Work, Work]:
    return Work(r, r, r * n), Work(1, 1, n)


# For each primitive but all_reduce: a function of the number of replicas and the bytes
# of each, which returns the total work and its longest chain.
_WORK: Mapping[str, Callable[[int, int], tuple[Work, Work]]] = {
    "all_gather": _gather,
    "all_to_all": _exchange,
    "barrier": _from_one,
    "broadcast": _from_one,
    "gather": _to_one,
    "message": _one_each,
    "permute": _one_each,
    "reduce": _to_one,
    "reduce_scatter": _scatter_sums,
    "scatter": _from_one,
}


def _scaled(
    seconds: float,
    row: Row,
    measured_count: int,
    replicas: int,
    kind: str,
    calibration: Calibration,
) -> float:
    """Scales the seconds of a communication to another number of replicas.

    A measurement of one replica contains the computation on the rows of all (products),
    which grows with the number of replicas, but not the exchange, which is modelled.
    """
    model, measured_model = (
        modelled(row, _participants(row, measured_count, n), kind, calibration)
        for n in (replicas, measured_count)
    )
    if measured_count == 1:
        return seconds * replicas if "factors" in row.algorithm else seconds + model
    if not calibration.of(kind).apart and len(row.group) < measured_count:
        model *= replicas / measured_count  # more groups share the cores
    if measured_model <= _LEAST_MODELLED:
        return seconds
    return seconds * model / measured_model


def _participants(row: Row, measured_count: int, replicas: int) -> int:
    """Returns the number of participants; groups of some replicas keep their size."""
    return replicas if len(row.group) == measured_count else len(row.group)


def _computing(measured: Measured, replicas: int) -> float:
    """Returns the seconds of a step for the replicas' own work, on devices like these.

    Between one replica and the measured number, the loss is interpolated linearly.
    """
    measured_count = measured.replicas
    if measured.cores is None:
        return measured.compute if measured_count > 1 else _single_seconds(measured)
    least = _least(measured, replicas, measured.cores)
    loss = measured.compute / _least(measured, measured_count, measured.cores)
    if replicas < measured_count:
        without_once = max(0.0, _single_seconds(measured) - measured.once)
        loss_of_one = without_once / _least(measured, 1, measured.cores)
        position = (replicas - 1) / (measured_count - 1)
        loss = loss_of_one + (loss - loss_of_one) * position
    return least * loss


def _lost(measured: Measured, replicas: int) -> float:
    """Returns half of the possible loss through sharing, if it was not measured.

    All cores but one are idle for at most the time of one replica; the part of that
    which exceeds the replicas' least time is lost.
    """
    if measured.cores is None or measured.replicas > 1:
        return 0.0
    single, cores = _single_seconds(measured), measured.cores
    most = replicas * measured.work / cores + (1 - 1 / cores) * single
    lost = max(0.0, most - _least(measured, replicas, cores))
    return measured.compute * lost / single / 2


def _least(measured: Measured, replicas: int, cores: int) -> float:
    """Returns the least seconds of the steps of `replicas` replicas on shared cores."""
    return max(_single_seconds(measured), replicas * measured.work / cores)


def _single_seconds(measured: Measured) -> float:
    return max(measured.alone - measured.fixed, _LEAST_MODELLED)


def _nbytes(value: object) -> int:
    """Returns the size of an operand in bytes, or a guess if it is unknown."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", "")
    if shape is None or None in shape:
        return _UNKNOWN_BYTES
    return math.prod(shape) * tf.as_dtype(dtype).size
