# SPDX-License-Identifier: Apache-2.0
"""Makes mirrored variables equal after an error in a step that is called eagerly.

graph/order/phases.py ensures that in all ways of running, for the failures that it
foresees. A failed write inside a replica's own conditional, exhausted memory or a
cancelled call may still stop replicas in the middle of their writes. Here, all
components are given the first one's value before the caller of the step gets the error.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import cluster
from replicator.cluster import faults, lookout
from replicator.cluster.peers import Peers
from replicator.step import eager_calls, error_messages
from replicator.variables.replicated import ReplicatedVariable

_GRACE = 1.0  # seconds within which a step must fail in all processes
_POLL = 0.25


@dataclasses.dataclass(frozen=True)
class MirroredComponents:
    """The components of a mirrored variable, which itself may be freed before its step.

    Attributes:
        handles: The handles of the components, the first of which is copied on repair.
        dtype: The dtype of its value.
    """

    handles: tuple[tf.Tensor, ...]
    dtype: tf.DType

    def mend(self) -> None:
        """Gives all components the value of the first."""
        first, *others = self.handles
        value = tf.raw_ops.ReadVariableOp(resource=first, dtype=self.dtype)
        for handle in others:
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def mirrored(
    captured: Iterable[tf.Tensor], owners: Mapping[int, ReplicatedVariable]
) -> list[MirroredComponents]:
    """Returns the mirrored variables of a step.

    Args:
        captured: The tensors that the step captured.
        owners: The variable behind each handle, by the handle's id.
    """
    captured_variables = (owners.get(id(tensor)) for tensor in captured)
    variables = {
        id(variable): variable
        for variable in captured_variables
        if variable is not None
    }
    return [
        MirroredComponents(_handles(variable), variable.dtype)
        for variable in variables.values()
        if variable.placement.is_copied or variable.placement.has_copies
    ]


def _handles(variable: ReplicatedVariable) -> tuple[tf.Tensor, ...]:
    """Returns the handles of all components, with the one to copy first."""
    first = variable.storage.first
    others = [other for other in variable.components if other is not first]
    return tuple(component.handle for component in (first, *others))


def equal_after_errors(
    run: Callable[..., Any],
    variables: Sequence[MirroredComponents],
    peers: Peers | None = None,
) -> Callable[..., Any]:
    """Wraps the run of a step to leave its variables equal if it fails.

    Args:
        run: Runs the step, eagerly.
        variables: The mirrored variables that it uses.
        peers: The processes that hold other components, if there are any.
    """

    def call(*args: Any) -> Any:
        try:
            return run(*args)
        except eager_calls.ExhaustedError:
            raise  # nothing is written before all inputs have arrived
        except tf.errors.OpError as error:
            if peers is not None:
                peers.monitor.check()
            lost = faults.lost(error)
            if lost is not None:  # its components are lost, too: nothing to mend
                raise lost from error
            if peers is not None:
                _agree(peers, error)
            for variable in variables:
                variable.mend()
            short_error = error_messages.shorten(error)
            if short_error is error:
                raise
            raise short_error from None

    return call


def _agree(peers: Peers, error: tf.errors.OpError) -> None:
    """Aborts all processes unless the step failed in each of them.

    If it failed in only some, the others may wait for them in it, or have completed it;
    the collectives that follow would no longer match.

    Args:
        peers: The processes.
        error: The error that the step raised in this process.

    Raises:
        HostLostError: A process was lost meanwhile.
    """
    key = f"replicator/failed/{peers.number}/{next(peers.failures)}"
    text = _reason(error)
    with faults.named():
        cluster.store_put(f"{key}/{peers.process}", text)
        if _have_all_reported(peers, key):
            return
    lookout.fail(peers.process, f"a step failed there: {text}")


def _have_all_reported(peers: Peers, place: str) -> bool:
    deadline = time.monotonic() + _GRACE
    for process in peers.processes:
        while cluster.store_get(f"{place}/{process}", _POLL) is None:
            if time.monotonic() > deadline:
                return False
    return True


def _reason(error: tf.errors.OpError) -> str:
    """Returns TensorFlow's message without the stack frames before it."""
    lines = str(error.message).splitlines()
    frames = [k for k, line in enumerate(lines) if line.startswith('  File "')]
    text = " ".join(" ".join(lines[frames[-1] + 1 if frames else 0 :]).split())
    return f"{type(error).__name__}: {text.partition(' [[{{')[0]}"
