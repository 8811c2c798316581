# SPDX-License-Identifier: Apache-2.0
"""Replicates a program's variables and places the ops that use them.

The strategy, if there is one, decides on each variable's components. An op is placed
where the variable it uses is: with its owner, else with the op's own replica.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from replicator import _tf, errors
from replicator.autodist import marked, uses
from replicator.autodist.cuts import Decided
from replicator.autodist.program import Program
from replicator.graph.ir import shapes
from replicator.graph.ir.kinds import SWITCHING, kind_of, resource_inputs
from replicator.graph.passes.owners import Aliases
from replicator.step.draft import Settings
from replicator.variables import storage

SCOPE = "AutoDist/variables"


class Variables:
    """A program's variables in the default graph.

    Args:
        program: The single-device graph.
        settings: The devices, and what creates variables.
        decided: The strategy's decisions on them.

    Attributes:
        made: ReplicatedVariables, by the names of the program's variables.
    """

    def __init__(self, program: Program, settings: Settings, decided: Decided) -> None:
        self._world = settings.world
        self.made: dict[str, Any] = {}
        placeholder_values: dict[Any, tf.Tensor] = {}
        slots = decided.slots
        with tf.name_scope(SCOPE):
            for name in sorted(program.variables, key=slots.__contains__):
                variable = program.variables[name]
                kind = variable.dtype, shapes.static(variable)
                if kind not in placeholder_values:
                    placeholder_values[kind] = marked.empty(variable)
                self.made[name] = settings.factory.creator(
                    None,
                    # A placeholder value: the copy of the user's own initializer
                    # assigns the real one.
                    initial_value=placeholder_values[kind],
                    name=name,
                    shape=variable.shape,
                    trainable=False,  # the strategy has already decided
                    slot_of=self.made.get(slots.get(name, "")),
                    chosen=decided.chosen.get(name),
                )

    def mirror(self, program: Program, names: Mapping[str, str]) -> None:
        """Gives each replica a component of some variables, for the reasons passed."""
        needs = []
        for name, why in names.items():
            line = errors.line_of(program.variables[name].op)
            needs.append(storage.Need(self.made[name], why, line))
        with tf.name_scope(f"{SCOPE}/mirrored"):
            storage.mirror_all(needs)

    def moved(self) -> dict[str, str]:
        """Returns the variables that were mirrored afterwards, and why."""
        whys = {
            name: variable.storage.why_mirrored for name, variable in self.made.items()
        }
        return {name: why for name, why in whys.items() if why is not None}

    def owned(self) -> list[Any]:
        """Returns the variables that one replica owns."""
        variables = self.made.values()
        return [
            variable for variable in variables if variable.placement.owner is not None
        ]

    def owner_of(self, variable: Any) -> int | None:
        """Returns the place of the replica that owns a program's variable, or None."""
        owner = self.made[variable.op.name].placement.owner
        return None if owner is None else self._world.place(owner)

    def behind(self, program: Program, tensor: tf.Tensor) -> Any:
        """Returns the ReplicatedVariable that a tensor is a handle of, or None."""
        original = program.variable_behind(tensor)
        return None if original is None else self.made[original.op.name]

    def handle(
        self, program: Program, tensor: tf.Tensor, r: int, aliases: Aliases | None
    ) -> tf.Tensor | None:
        """Returns a replica's handle of the variable that a tensor is a handle of.

        Args:
            program: The program of the tensor.
            tensor: Any tensor.
            r: The replica.
            aliases: The build's aliases; None once it is finished.
        """
        variable = self.behind(program, tensor)
        if variable is None:
            return None
        if aliases is not None:
            handle: tf.Tensor = variable.placement.handle_on(variable, r, aliases)
        elif variable.placement.owner is not None:
            handle = variable.storage.first.handle
        else:
            handle = variable.components[self._world.place(r)].handle
        return handle

    def placed(self, program: Program, op: tf.Operation, device: str) -> str:
        """Returns the device of a replica's copy of an op.

        An op that the user put on a device of the replicas' kind goes to the replica's,
        since the user meant the only device there was.

        Args:
            program: The program of the op.
            op: The op.
            device: The replica's device.
        """
        handles = resource_inputs(op)
        if op.type in SWITCHING and op.inputs[0].dtype == tf.resource:
            handles = [(0, op.inputs[0])]
        for _, tensor in handles:
            variable = self.behind(program, uses.passed_on(tensor))
            if variable is not None and not _calls(op):
                if variable.placement.has_copies and op.type in uses.READS:
                    return device
                return self.at_owner(program, tensor) or device
            if tensor.op in program.shared:
                resource_device: str = op.device
                return resource_device  # TensorFlow places it with the resource
        if not op.device:
            return device
        own_spec, asked = _spec(device), _spec(op.device)
        if asked.device_type in (None, own_spec.device_type):
            return device
        return own_spec.replace(
            device_type=asked.device_type, device_index=asked.device_index
        ).to_string()

    def at_owner(self, program: Program, tensor: tf.Tensor) -> str:
        """Returns the device of an owned variable behind a handle, else ""."""
        variable = self.behind(program, uses.passed_on(tensor))
        if variable is None or variable.placement.owner is None:
            return ""
        return str(variable.placement.device(self._world))


@functools.lru_cache(maxsize=64)
def _spec(device: str) -> tf.DeviceSpec:
    """Returns a parsed device name; cached, as every op of every replica needs it."""
    return tf.DeviceSpec.from_string(device)


def _calls(op: tf.Operation) -> bool:
    return kind_of(op).calls and bool(_tf.called_graphs(op))
