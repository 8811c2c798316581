# SPDX-License-Identifier: Apache-2.0
"""Epoch: one pass over the inputs of a step, which `Replicator.epoch` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.inputs import checks
from replicator.step.eager_calls import ExhaustedError
from replicator.step.requests import Request
from replicator.step.state import State
from replicator.step.steps import Step


class Epoch:
    """The results of a step, from the first element of its inputs to the last.

    Args:
        step: The step.
        state: What it keeps between its calls.
        length: The number of its results; None if it is unknown.
    """

    def __init__(self, step: Step, state: State, length: int | None) -> None:
        self._step, self._state, self._length = step, state, length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The number of steps of this epoch is not known.")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self._step.initialize()
        self._state.passes += 1
        this_pass = self._state.passes
        while True:
            try:
                result = self._step()
            except ExhaustedError:
                return
            yield result
            if self._state.passes != this_pass:
                raise errors.InputError(
                    "an epoch went on after another one over the same data set had "
                    "begun, which has restarted the inputs of both.",
                    fix="finish one epoch before the next, or give the step another "
                    "Dataset, e.g. dataset.map(lambda *x: x).",
                )


def length_of(request: Request, num_replicas: int) -> int | None:
    """Returns how many steps one pass takes, or None if that is unknown.

    Args:
        request: The step and its inputs.
        num_replicas: How many replicas take elements of its Dataset in turn.

    Raises:
        InputError: There are no inputs, or they never end.
    """
    source = request.source
    if source is None:
        inputs = "values, which do not end" if request.by_value else "no inputs"
        raise errors.InputError(
            f"epoch was given {inputs}.",
            fix="pass a tf.data.Dataset, or a function that returns one.",
        )
    if not isinstance(source, checks.DATASETS):
        return None
    count = int(tf.data.experimental.cardinality(source))
    if count == tf.data.INFINITE_CARDINALITY:
        raise errors.InputError(
            "epoch was given a Dataset that never ends.",
            fix="leave out its repeat(), or pass dataset.take(n).",
        )
    if count == tf.data.UNKNOWN_CARDINALITY:
        return None
    if request.input_mode == "global_batch":
        return count
    surplus = num_replicas - 1 if request.remainder == "pad" else 0
    return (count + surplus) // num_replicas
