# SPDX-License-Identifier: Apache-2.0
"""After an error in a step that is called eagerly, mirrored variables are equal.

graph/order/phases.py sees to that in all ways of running, for what it knows can fail. A
write that fails inside a replica's own conditional, memory that runs out or a call that
is cancelled may still stop replicas amid their writes; here, whoever calls the step
gets the error after all components have been given the first one's value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator.cluster import failures, faults
from replicator.cluster.peers import Peers
from replicator.step import failed
from replicator.variables.replicated import ReplicatedVariable


@dataclasses.dataclass(frozen=True)
class Mirrored:
    """The components of a mirrored variable; itself may be gone before its step is.

    Attributes:
        handles: `handles[r]` is where replica r's is.
        dtype: Of its value.
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
) -> list[Mirrored]:
    """Returns the mirrored variables of a step.

    Args:
        captured: The tensors that the step captured.
        owners: The variable behind each handle, by the handle's id.
    """
    found = (owners.get(id(tensor)) for tensor in captured)
    variables = {id(variable): variable for variable in found if variable is not None}
    return [
        Mirrored(_handles(variable), variable.dtype)
        for variable in variables.values()
        if variable.placement.is_copied or variable.placement.has_copies
    ]


def _handles(variable: ReplicatedVariable) -> tuple[tf.Tensor, ...]:
    """Returns the handles of all components, that of what is copied first."""
    first = variable.storage.first
    others = [one for one in variable.components if one is not first]
    return tuple(component.handle for component in (first, *others))


def equal_after_errors(
    run: Callable[..., Any], variables: Sequence[Mirrored], peers: Peers | None = None
) -> Callable[..., Any]:
    """Returns what runs a step, and leaves variables equal if it fails.

    Args:
        run: Runs the step, eagerly.
        variables: Those that it uses.
        peers: The processes that hold other components, if there are any.
    """

    def call(*args: Any) -> Any:
        try:
            return run(*args)
        except tf.errors.OutOfRangeError:
            raise  # nothing is written before all inputs have arrived
        except tf.errors.OpError as error:
            if peers is not None:
                peers.doing.check()
            lost = faults.lost(error)
            if lost is not None:  # with what was on the host: there is nothing to mend
                raise lost from error
            if peers is not None:
                failures.agree(peers, error)
            for variable in variables:
                variable.mend()
            told = failed.in_short(error)
            if told is error:
                raise
            raise told from None

    return call
