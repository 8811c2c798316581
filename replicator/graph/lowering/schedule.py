# SPDX-License-Identifier: Apache-2.0
"""How long a communication takes between hosts, from the ops that it was lowered to.

A simulation, event by event. Each op waits for its inputs and for its device; each
tensor that leaves a host waits until the host's link is free, and that of the host to
which it goes, and is sent as soon as both are: first come, first served. Messages of a
link come one after the other, as in the model by which algorithms are chosen
(costs/rates.py), and nothing else of the step is in their way. Products of factors are
not counted: they are computation.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator.costs import cost, hosts, rates

_COPIES = frozenset(["ConcatV2", "Pack", "Slice", "Split", "SplitV", "Cast"])
_FREE = frozenset(["PlaceholderWithDefault", "Identity", "Reshape", "Const", "MatMul"])


def seconds(
    operands: Sequence[Sequence[tf.Tensor]],
    results: Sequence[Sequence[tf.Tensor]],
    devices: Sequence[str],
    calibration: rates.Calibration,
) -> float:
    """Returns how long it takes until all participants have their results.

    Args:
        operands: `operands[n]` is what participant n passes, at 0 seconds.
        results: `results[n]` is what participant n receives.
        devices: `devices[n]` is where participant n runs.
        calibration: What work costs.
    """
    clock = _Clock(calibration)
    given = {x.ref(): x for own in operands for x in own}
    waiting = []
    for own, device in zip(results, devices, strict=True):
        for x in own:
            clock.read(x, device, None)
            waiting.append(x)
    seen: set[tf.Operation] = set()
    while waiting:
        x = waiting.pop()
        if x.ref() in given:
            clock.make(x, 0.0)
            del given[x.ref()]
        elif x.op not in seen:
            seen.add(x.op)
            clock.add(x.op)
            waiting += x.op.inputs
    return clock.run()


class _Clock:
    """What happens when.

    Args:
        calibration: What work costs.
    """

    def __init__(self, calibration: rates.Calibration) -> None:
        self._calibration = calibration
        self._events: list[Any] = []  # (time, number, tensor, device): made or arrived
        self._numbers = itertools.count()
        # By tensor and device: which ops read it there; None: a participant.
        self._readers: dict[Any, dict[str, list[tf.Operation | None]]] = {}
        self._missing: dict[tf.Operation, int] = {}  # inputs
        self._free: dict[Any, float] = {}  # by device or host, and by ends of links

    def read(self, tensor: tf.Tensor, device: str, reader: tf.Operation | None) -> None:
        """Notes that a tensor is read on a device."""
        places = self._readers.setdefault(tensor.ref(), {})
        places.setdefault(device, []).append(reader)

    def make(self, tensor: tf.Tensor, time: float) -> None:
        """Notes that a tensor is made."""
        self._push(time, tensor, None)

    def add(self, op: tf.Operation) -> None:
        """Notes that an op runs once it has its inputs."""
        self._missing[op] = len(op.inputs)
        for x in op.inputs:
            self.read(x, op.device, op)
        if not op.inputs:
            self._start(op, 0.0)

    def run(self) -> float:
        """Has all happen; returns when the last tensor arrived."""
        time = 0.0
        while self._events:
            time, _, tensor, device = heapq.heappop(self._events)
            if device is None:
                for place in self._readers.get(tensor.ref(), ()):
                    self._push(self._sent(tensor, place, time), tensor, place)
                continue
            for op in self._readers[tensor.ref()][device]:
                if op is not None:
                    self._missing[op] -= 1
                    if not self._missing[op]:
                        self._start(op, time)
        return time

    def _push(self, time: float, tensor: tf.Tensor, device: str | None) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), tensor, device))

    def _start(self, op: tf.Operation, time: float) -> None:
        """Runs an op once its device is free, or its host where cores are shared."""
        own = self._calibration.of(rates.kind_of([op.device]))
        place = op.device if own.apart else hosts.host_of(op.device)
        end = max(time, self._free.get(place, 0.0)) + _work(op).seconds(own)
        self._free[place] = end
        for tensor in op.outputs:
            self.make(tensor, end)

    def _sent(self, tensor: tf.Tensor, device: str, time: float) -> float:
        """Returns when a tensor that was made is there on a device."""
        source = tensor.device
        if not source or source == device:
            return time
        nbytes = cost.tensor_bytes(tensor)
        ends = hosts.host_of(source), hosts.host_of(device)
        if ends[0] == ends[1]:
            own = self._calibration.of(rates.kind_of([source, device]))
            return time + own.message + nbytes * own.link
        own = self._calibration.between(*ends)
        link = ("from", ends[0]), ("to", ends[1])
        begin = max(time, *(self._free.get(end, 0.0) for end in link))
        arrived = begin + own.message + nbytes * own.link
        self._free.update(dict.fromkeys(link, arrived))
        return arrived


def _work(op: tf.Operation) -> rates.Work:
    """Returns what an op does: most that a reduction is made of pass over operands."""
    if op.type in _FREE:
        return rates.Work(1)
    if op.type in _COPIES:
        return rates.Work(1, copied=sum(map(cost.tensor_bytes, op.outputs)))
    return rates.Work(1, added=sum(map(cost.tensor_bytes, op.inputs)))
