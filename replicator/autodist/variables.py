# SPDX-License-Identifier: Apache-2.0
"""The variables of a program in the graph of all replicas, and where ops are.

Each has components as the strategy says, or as there is none. Ops are where what they
use is: with the one who owns a variable, or else with their replica.
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
    """What a program's variables are in the default graph.

    Args:
        program: The single-device graph.
        settings: The devices, and what makes variables.
        decided: What a strategy says of them.

    Attributes:
        made: ReplicatedVariables, by the names of the program's.
    """

    def __init__(self, program: Program, settings: Settings, decided: Decided) -> None:
        self._world = settings.world
        self.made: dict[str, Any] = {}
        empty: dict[Any, tf.Tensor] = {}
        slots = decided.slots
        with tf.name_scope(SCOPE):
            for name in sorted(program.variables, key=slots.__contains__):
                variable = program.variables[name]
                kind = variable.dtype, shapes.static(variable)
                if kind not in empty:
                    empty[kind] = marked.empty(variable)
                self.made[name] = settings.factory.creator(
                    None,
                    # What is initialized is a copy of the user's own initializer.
                    initial_value=empty[kind],
                    name=name,
                    shape=variable.shape,
                    trainable=False,  # the strategy has been asked
                    slot_of=self.made.get(slots.get(name, "")),
                    chosen=decided.chosen.get(name),
                )

    def mirror(self, program: Program, names: Mapping[str, str]) -> None:
        """Gives each replica a component of some variables, given why."""
        needs = []
        for name, why in names.items():
            line = errors.line_of(program.variables[name].op)
            needs.append(storage.Need(self.made[name], why, line))
        with tf.name_scope(f"{SCOPE}/mirrored"):
            storage.mirror_all(needs)

    def moved(self) -> dict[str, str]:
        """Returns the variables that have been given components, and why."""
        whys = {name: one.storage.why_mirrored for name, one in self.made.items()}
        return {name: why for name, why in whys.items() if why is not None}

    def owned(self) -> list[Any]:
        """Returns those that one replica owns for all."""
        every = self.made.values()
        return [one for one in every if one.placement.owner is not None]

    def owner_of(self, variable: Any) -> int | None:
        """Returns the place of the replica that owns a variable of the program's."""
        owner = self.made[variable.op.name].placement.owner
        return None if owner is None else self._world.place(owner)

    def behind(self, program: Program, tensor: tf.Tensor) -> Any:
        """Returns the variable of which a tensor is a handle, or None."""
        original = program.variable_behind(tensor)
        return None if original is None else self.made[original.op.name]

    def handle(
        self, program: Program, tensor: tf.Tensor, r: int, aliases: Aliases | None
    ) -> tf.Tensor | None:
        """Returns a replica's handle of the variable that a tensor stands for.

        Args:
            program: Has the tensor.
            tensor: Any one.
            r: The replica.
            aliases: Of the build; None: there are no aliases any more.
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
        """Returns where a replica has an op.

        What the user has put on a device of the replicas' kind is meant for the one
        device that there was.

        Args:
            program: Has the op.
            op: The op.
            device: That of the replica.
        """
        given = resource_inputs(op)
        if op.type in SWITCHING and op.inputs[0].dtype == tf.resource:
            given = [(0, op.inputs[0])]
        for _, tensor in given:
            variable = self.behind(program, uses.passed_on(tensor))
            if variable is not None and not _calls(op):
                if variable.placement.has_copies and op.type in uses.READS:
                    return device
                return self.at_owner(program, tensor) or device
            if tensor.op in program.shared:
                own: str = op.device
                return own  # TensorFlow puts it where the resource is
        if not op.device:
            return device
        own_spec, asked = _spec(device), _spec(op.device)
        if asked.device_type in (None, own_spec.device_type):
            return device
        return own_spec.replace(
            device_type=asked.device_type, device_index=asked.device_index
        ).to_string()

    def at_owner(self, program: Program, tensor: tf.Tensor) -> str:
        """Returns where the variable behind a handle is; "": with each replica."""
        variable = self.behind(program, uses.passed_on(tensor))
        if variable is None or variable.placement.owner is None:
            return ""
        return str(variable.placement.device(self._world))


@functools.lru_cache(maxsize=64)
def _spec(device: str) -> tf.DeviceSpec:
    """Returns a device's name in parts; it is asked for of each op of each replica."""
    return tf.DeviceSpec.from_string(device)


def _calls(op: tf.Operation) -> bool:
    return kind_of(op).calls and bool(_tf.called_graphs(op))
