# SPDX-License-Identifier: Apache-2.0
"""What a step will take on other numbers of replicas, and whether more of them pay.

Each replica keeps its batch, so that R replicas compute R batches in a step. With
T_comp, a step alone, and T_sync, what a step of R takes more, that is R T_comp in
T_comp + T_sync: a speed-up of R / (1 + T_sync / T_comp). It exceeds 1, and so pays, as
long as T_sync / T_comp < R - 1.

Source: Das 2018, Deep Learning at scale: The "torch.distributed" API, inequality (5).
On cores that replicas share, what each computes takes as long as one replica, or as all
work divided among the cores (Brent 1974, The parallel evaluation of general arithmetic
expressions), whichever is longer, times what was measured to be lost in sharing. What
one replica computes for all, the update of a variable that it owns, takes what it took.
Where one replica was measured, nobody knows what is lost: less than Graham 1969 proves
(Bounds on multiprocessing timing anomalies), and half of that is predicted.

A prediction has bounds. On shared cores more replicas add at least what they would if
no core were idle meanwhile, and at most as much as those that were measured; on hosts
of their own, a step takes at least the longer of computing and communication, if one
hides the other, and at most one after the other. Both are as much wider as what was
measured varies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from replicator.costs import cost, rates
from replicator.costs.rates import Calibration, Rates, Work
from replicator.plan.rows import Row
from replicator.profile.parts import Measured

MOST_REPLICAS = 64
_UNKNOWN_BYTES = 1 << 10  # as in costs/cost.py
_LEAST_MODELLED = 1e-12  # seconds: what costs nothing by the model cannot be scaled


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A step on some number of replicas.

    Attributes:
        replicas: How many.
        step: The seconds of a step.
        alone: Those of a step of one replica: T_comp.
        low: The least that a step should take.
        high: The most.
    """

    replicas: int
    step: float
    alone: float
    low: float = 0.0
    high: float = math.inf

    @property
    def sync(self) -> float:
        """T_sync: what a step takes more than one replica alone, in seconds."""
        return max(0.0, self.step - self.alone)

    @property
    def ratio(self) -> float:
        """T_sync / T_comp."""
        return self.sync / self.alone

    @property
    def speed_up(self) -> float:
        """How many times as many examples are computed in the same time."""
        return self.replicas * self.alone / self.step

    @property
    def pays(self) -> bool:
        """Whether that is more than one replica computes alone."""
        return self.ratio < self.replicas - 1


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Where more replicas stop to pay, of 2 to MOST_REPLICAS.

    Attributes:
        best: The number with the greatest speed-up; 1 if none pays.
        speed_up: That speed-up.
        stops: The least number from which on none pays; None: there is none.
        starts: The least number that pays; None: there is none.
    """

    best: int
    speed_up: float
    stops: int | None
    starts: int | None


def verdict(predicted: Sequence[Predicted]) -> Verdict:
    """Returns where it stops to pay.

    Args:
        predicted: For 1, 2, 3, ... replicas.
    """
    best = max(predicted, key=lambda own: (own.speed_up, -own.replicas))
    stops = None
    for own in reversed(predicted):
        if own.replicas == 1 or own.pays:
            break
        stops = own.replicas
    starts = next((own.replicas for own in predicted if own.pays), None)
    return Verdict(best.replicas, best.speed_up, stops, starts)


def here(measured: Measured, replicas: int, calibration: Calibration) -> Predicted:
    """Returns a step on as many devices like those at hand.

    Args:
        measured: What was measured.
        replicas: How many replicas.
        calibration: What work costs.
    """
    alone, found = measured.alone, measured.replicas
    if replicas == 1:
        return _between(measured, 1, alone, (alone, alone))
    kind = rates.kind_of(measured.devices)
    waits = sum(
        _scaled(seconds, row, found, replicas, kind, calibration)
        for seconds, row in zip(measured.communication, measured.rows, strict=True)
    )
    lost = _lost(measured, replicas)
    step = (
        measured.fixed + measured.once + _computing(measured, replicas) + lost + waits
    )
    if measured.cores is None or replicas == found:
        bounds = step, step
    elif found == 1:
        bounds = step - lost, replicas * alone + waits
    elif replicas < found:
        bounds = alone, measured.step
    else:
        more = (step - measured.step) * measured.busy
        bounds = measured.step + more, measured.step * replicas / found
    return _between(measured, replicas, step, bounds)


def _between(
    measured: Measured, replicas: int, step: float, bounds: tuple[float, float]
) -> Predicted:
    """Returns a prediction whose bounds hold it, wider by what was seen to vary."""
    low, high = min(step, *bounds), max(step, *bounds)
    wider = 1 + measured.spread
    return Predicted(replicas, step, measured.alone, low / wider, high * wider)


def apart(
    measured: Measured, replicas: int, calibration: Calibration, network: Rates
) -> Predicted:
    """Returns a step on hosts like this one, with one replica each.

    Args:
        measured: What was measured.
        replicas: How many replicas.
        calibration: What work costs.
        network: What it costs between hosts.
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
    """Returns the seconds that a communication takes by the calibration.

    Its small tensors share messages; it sends one at least.

    Args:
        row: The communication.
        count: How many replicas take part.
        kind: One of rates.KINDS.
        calibration: What work costs.
    """
    if count < 2:
        return 0.0
    sizes = [_nbytes(value) for value in row.operands[0]] if row.operands else []
    turns = 1 if row.times is None else row.times
    empty = _of_tensor(row, 0, count, kind, calibration)
    messages = max(1.0, sum(map(cost.filled, sizes)))
    seconds = messages * empty
    for size in sizes:
        seconds += _of_tensor(row, size, count, kind, calibration) - empty
    return turns * seconds


def _of_tensor(
    row: Row, nbytes: int, count: int, kind: str, calibration: Calibration
) -> float:
    """Returns the seconds for one tensor, in a message of its own."""
    if row.primitive == "all_reduce":
        able = [a for a in cost.ALGORITHM_NAMES if a != "nccl"]
        named = [a for a in able if a in row.algorithm.split(", ")]
        return min(
            calibration.seconds(a, kind, count, nbytes)
            for a in (named if kind != "hosts" and named else able)
        )
    whole, chain = _WAYS.get(row.primitive, _exchange)(count, nbytes)
    own = calibration.of(kind)
    return (chain if own.apart else whole).seconds(own)


def _to_one(r: int, n: int) -> tuple[Work, Work]:
    """Returns all of the work of what one replica receives, and its longest chain."""
    whole = Work(1, r - 1, (r - 1) * n, r * n)
    return whole, whole


def _from_one(r: int, n: int) -> tuple[Work, Work]:
    whole = Work(r, r - 1, (r - 1) * n)
    return whole, whole


def _gather(r: int, n: int) -> tuple[Work, Work]:
    whole = Work(1, 2 * (r - 1), (r - 1) * n * (1 + r), 0, r * n)
    return whole, whole


def _exchange(r: int, n: int) -> tuple[Work, Work]:
    own = Work(r, r - 1, (r - 1) * n / r, 0, n)
    return Work(r * r, r * (r - 1), (r - 1) * n, 0, r * n), own


def _scatter_sums(r: int, n: int) -> tuple[Work, Work]:
    own = Work(r, r - 1, (r - 1) * n / r, n)
    return Work(r * r, r * (r - 1), (r - 1) * n, r * n), own


def _one_each(r: int, n: int) -> tuple[Work, Work]:
    return Work(r, r, r * n), Work(1, 1, n)


# For each primitive but all_reduce: takes the number of replicas and the bytes of each,
# returns all of the work and the longest chain of it.
_WAYS: Mapping[str, Callable[[int, int], tuple[Work, Work]]] = {
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
    found: int,
    replicas: int,
    kind: str,
    calibration: Calibration,
) -> float:
    """Returns what a communication takes, from what it took on `found` replicas.

    One replica alone computes what is computed from the rows of all: products. So much
    of that as there are replicas is computed then; what is exchanged, it has not been.
    """
    before = modelled(row, _participants(row, found, found), kind, calibration)
    after = modelled(row, _participants(row, found, replicas), kind, calibration)
    if found == 1:
        return seconds * replicas if "factors" in row.algorithm else seconds + after
    if not calibration.of(kind).apart and len(row.group) < found:
        after *= replicas / found  # more groups share the cores
    return seconds * after / before if before > _LEAST_MODELLED else seconds


def _participants(row: Row, found: int, replicas: int) -> int:
    """Returns how many take part; groups of some replicas stay as large as they are."""
    return replicas if len(row.group) == found else len(row.group)


def _computing(measured: Measured, replicas: int) -> float:
    """Returns what the replicas compute of a step, each its own, on devices like these.

    Between one replica and those that were measured, what is lost grows evenly.
    """
    found = measured.replicas
    if measured.cores is None:
        return measured.compute if found > 1 else _own(measured)
    least = _least(measured, replicas, measured.cores)
    lost = measured.compute / _least(measured, found, measured.cores)
    if replicas < found:
        own = max(0.0, _own(measured) - measured.once)
        before = own / _least(measured, 1, measured.cores)
        lost = before + (lost - before) * (replicas - 1) / (found - 1)
    return least * lost


def _lost(measured: Measured, replicas: int) -> float:
    """Returns half of what can be lost in sharing, where that was not measured.

    Cores are idle for as long as one replica computes, at most, on all but one of them;
    so much of that as exceeds what the replicas take at least anyway is lost.
    """
    if measured.cores is None or measured.replicas > 1:
        return 0.0
    own, cores = _own(measured), measured.cores
    most = replicas * measured.work / cores + (1 - 1 / cores) * own
    lost = max(0.0, most - _least(measured, replicas, cores))
    return measured.compute * lost / own / 2


def _least(measured: Measured, replicas: int, cores: int) -> float:
    """Returns the least that so many steps of one replica take on shared cores."""
    return max(_own(measured), replicas * measured.work / cores)


def _own(measured: Measured) -> float:
    return max(measured.alone - measured.fixed, _LEAST_MODELLED)


def _nbytes(value: object) -> int:
    """Returns the size of an operand in bytes, or a guess where that is unknown."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", "")
    if shape is None or None in shape:
        return _UNKNOWN_BYTES
    return math.prod(shape) * tf.as_dtype(dtype).size
