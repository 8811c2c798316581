# SPDX-License-Identifier: Apache-2.0
"""Estimates how long a communication between hosts takes, from its lowered ops.

A discrete-event simulation. Each op waits for its inputs and for its device; each
tensor that leaves a host waits until its own host's link and the destination's are
free, and is then sent: first come, first served. Messages on a link are sent one after
another, as in the model by which algorithms are chosen (costs/rates.py), and the rest
of the step does not compete with them. Products of factors are computation and cost
nothing here.
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
    """Returns the time until all participants have their results.

    Args:
        operands: `operands[n]` is what participant n passes, at 0 seconds.
        results: `results[n]` is what participant n receives.
        devices: `devices[n]` is where participant n runs.
        calibration: The cost of work.
    """
    clock = _Clock(calibration)
    unvisited = {x.ref(): x for tensors in operands for x in tensors}
    waiting = []
    for tensors, device in zip(results, devices, strict=True):
        for x in tensors:
            clock.read(x, device, None)
            waiting.append(x)
    seen: set[tf.Operation] = set()
    while waiting:
        x = waiting.pop()
        if x.ref() in unvisited:
            clock.make(x, 0.0)
            del unvisited[x.ref()]
        elif x.op not in seen:
            seen.add(x.op)
            clock.add(x.op)
            waiting += x.op.inputs
    return clock.run()


class _Clock:
    """Simulates when each op runs and when each tensor arrives.

    Args:
        calibration: The cost of work.
    """

    def __init__(self, calibration: rates.Calibration) -> None:
        self._calibration = calibration
        # (time, number, tensor, device): computed if the device is None, else arrived.
        self._events: list[Any] = []
        self._numbers = itertools.count()
        # By tensor and device: the ops that read it there; None for a participant.
        self._readers: dict[Any, dict[str, list[tf.Operation | None]]] = {}
        self._missing: dict[tf.Operation, int] = {}  # number of inputs yet to arrive
        self._free: dict[Any, float] = {}  # by device or host, and by ends of links

    def read(self, tensor: tf.Tensor, device: str, reader: tf.Operation | None) -> None:
        """Records that a tensor is read on a device."""
        places = self._readers.setdefault(tensor.ref(), {})
        places.setdefault(device, []).append(reader)

    def make(self, tensor: tf.Tensor, time: float) -> None:
        """Records that a tensor is computed at a time."""
        self._push(time, tensor, None)

    def add(self, op: tf.Operation) -> None:
        """Records that an op runs once it has its inputs."""
        self._missing[op] = len(op.inputs)
        for x in op.inputs:
            self.read(x, op.device, op)
        if not op.inputs:
            self._start(op, 0.0)

    def run(self) -> float:
        """Runs the simulation; returns when the last tensor arrives."""
        time = 0.0
        while self._events:
            time, _, tensor, device = heapq.heappop(self._events)
            if device is None:
                for place in self._readers.get(tensor.ref(), ()):
                    self._push(self._arrival(tensor, place, time), tensor, place)
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
        """Runs an op once its device is free, or its host if devices share cores."""
        rate = self._calibration.of(rates.kind_of([op.device]))
        place = op.device if rate.apart else hosts.host_of(op.device)
        end = max(time, self._free.get(place, 0.0)) + _work(op).seconds(rate)
        self._free[place] = end
        for tensor in op.outputs:
            self.make(tensor, end)

    def _arrival(self, tensor: tf.Tensor, device: str, time: float) -> float:
        """Returns when a newly computed tensor arrives at a device."""
        source = tensor.device
        if not source or source == device:
            return time
        nbytes = cost.tensor_bytes(tensor)
        ends = hosts.host_of(source), hosts.host_of(device)
        if ends[0] == ends[1]:
            rate = self._calibration.of(rates.kind_of([source, device]))
            return time + rate.message + nbytes * rate.link
        rate = self._calibration.between(*ends)
        link = ("from", ends[0]), ("to", ends[1])
        begin = max(time, *(self._free.get(end, 0.0) for end in link))
        arrived = begin + rate.message + nbytes * rate.link
        self._free.update(dict.fromkeys(link, arrived))
        return arrived


def _work(op: tf.Operation) -> rates.Work:
    """Returns an op's work; most ops of a reduction make one pass over their inputs."""
    if op.type in _FREE:
        return rates.Work(1)
    if op.type in _COPIES:
        return rates.Work(1, copied=sum(map(cost.tensor_bytes, op.outputs)))
    return rates.Work(1, added=sum(map(cost.tensor_bytes, op.inputs)))
