# SPDX-License-Identifier: Apache-2.0
"""The distributed graph: a copy of a single-device graph for each replica.

The copies are put together by the passes that build a step, from where the replicas are
there: variables have one component per replica, or an owner; where the single-device
graph has a gradient of a variable, the replicas communicate; what they write is proven
to be equal. Replica 0's ops have the names of the user's, those of replica r stand
under `AutoDist-Replica-r/`.

Source: the in-graph replication of AutoDist (Zhang et al. 2020), which copies a graph
of one device, too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import _tf, context, errors
from replicator.autodist import (
    agreement,
    bodies,
    freshness,
    marked,
    refusals,
    shares,
    stamping,
)
from replicator.autodist.program import ELEMENTS, Program
from replicator.autodist.stamping import Places
from replicator.graph.ir import shapes
from replicator.graph.ir.kinds import kind_of, resource_inputs
from replicator.graph.passes import owners
from replicator.primitives import table
from replicator.step import passes
from replicator.step.draft import Draft, Settings
from replicator.variables import storage

PREFIX = "AutoDist-Replica-"
_VARIABLES = "AutoDist/variables"
_PASSES: tuple[Callable[[Draft], None], ...] = (
    passes.check_effects,
    passes.answer_messages,
    passes.check_equality,
    passes.lower,
    passes.check_leftovers,
)
_IN_CONTROL_FLOW = "used in a conditional, a loop or a function"


class _Again(Exception):
    """A build has learned which variables have to be mirrored.

    Attributes:
        mirrored: These, and what for.
    """

    def __init__(self, mirrored: Mapping[str, str]) -> None:
        self.mirrored = mirrored
        super().__init__(", ".join(mirrored))


def replicate(
    program: Program, settings: Settings, loss: str | None = None
) -> Replicas:
    """Returns all replicas of a single-device graph; see `Replicas`."""
    mirrored = dict.fromkeys(program.in_control_flow, _IN_CONTROL_FLOW)
    while True:
        try:
            return Replicas(program, settings, mirrored, loss)
        except _Again as again:
            known = len(mirrored)
            mirrored.update(again.mirrored)
            if len(mirrored) == known:
                raise refusals.unbuildable() from None


class Replicas:
    """All replicas of a single-device graph, in a graph of their own.

    Args:
        program: The single-device graph.
        settings: The devices, and what all steps on them share.
        mirrored: The names of variables of which each replica needs a component, and
            what for.
        loss: What the user says that losses are, "mean" or "sum", if anything.

    Attributes:
        graph: The graph of all replicas.
        places: `places[r]` has what an op of the original is on replica r; shared ones
            are on all.
        program: What it is copied from.
        plan: What is known of its values.
        shares: How many examples each replica has.

    Raises:
        ReplicatorError: The program cannot be copied, or replicas would drift apart.
    """

    def __init__(
        self,
        program: Program,
        settings: Settings,
        mirrored: Mapping[str, str],
        loss: str | None = None,
    ) -> None:
        self._settings, self.program, self._loss = settings, program, loss
        world = settings.world
        self.graph = tf.Graph()
        self.places: list[Places] = [{} for _ in world.local]
        self.communications: tuple[Any, ...] = ()
        self._parts: dict[int, tuple[int, int]] = {}
        self._reduced: list[Places] = [{} for _ in world.local]
        kind = tf.DeviceSpec.from_string(world.devices[0]).device_type
        self._bodies = bodies.Bodies(kind)
        self._finished = False
        self.plan = shares.Plan(program, loss)
        with self.graph.as_default():
            self._variables = self._create(program)
            self._build = context.Build(
                world,
                settings.options,
                self.graph,
                settings.ledger,
                owners.Aliases(self.graph, world),
                table.GRADIENTS,
                table.FACTS,
                step_key=self,
            )
            self._mirror(mirrored)
            every = self._variables.values()
            owned = [one for one in every if one.placement.owner is not None]
            self._build.aliases.make(owned, world.local)
            self.shares = shares.Shares(world)
            self._share(program)
            start = _tf.operation_count(self.graph)
            own = self._copy(program)
            self._deal(program)
            self._finish(own, start)
        self._finished = True

    def extend(self, renewed: Callable[[Program], Program]) -> None:
        """Copies what was added to the user's graph since it was looked at.

        Args:
            renewed: Returns the user's graph as it is now, given how it was.

        Raises:
            UnsupportedError: It is a variable, or something about which the replicas
                would have to communicate.
        """
        if _tf.operation_count(self.program.graph) == self.program.count:
            return
        program = renewed(self.program)
        plan = shares.Plan(program, self._loss)
        late = [
            program.variables[name].op
            for name in program.variables
            if name not in self._variables
        ]
        late += program.markers + [write.op for write in plan.writes]
        if late:
            raise refusals.too_late(late[0])
        with self.graph.as_default():
            self.program, self.plan = program, plan
            self._share(program)
            self._copy(program)
            self._deal(program)
            freshness.keep_owners_writes(program, self.places, self._owner_of)
            freshness.read_first(program, self.places)

    def _owner_of(self, variable: tf.Variable) -> int | None:
        """Returns the place of the replica that owns a variable of the user's."""
        owner = self._variables[variable.op.name].placement.owner
        return None if owner is None else self._settings.world.place(owner)

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the replicas are."""
        return self._settings.world.devices

    def counts(self, source: tf.Operation) -> list[tf.Tensor]:
        """Returns how many examples each replica has been dealt, as floats."""
        with self.graph.as_default():
            return self.shares.counts(source, self.places)

    # --- Variables --------------------------------------------------------------------

    def _create(self, program: Program) -> dict[str, Any]:
        """Creates the components of all variables; returns these by their names."""
        made: dict[str, Any] = {}
        empty: dict[Any, tf.Tensor] = {}
        slots = program.slots
        with tf.name_scope(_VARIABLES):
            for name in sorted(program.variables, key=slots.__contains__):
                variable = program.variables[name]
                kind = variable.dtype, shapes.static(variable)
                if kind not in empty:
                    empty[kind] = marked.empty(variable)
                made[name] = self._settings.factory.creator(
                    None,
                    # What is initialized is a copy of the user's own initializer.
                    initial_value=empty[kind],
                    name=name,
                    shape=variable.shape,
                    trainable=variable.trainable,
                    slot_of=made.get(slots.get(name, "")),
                    whole_in="a session of AutoDist",
                )
        chooser = self._settings.chooser
        if chooser is not None and chooser.undecided:
            logging.warning(
                "The strategy decides on %s only once it has seen gradients, and in a "
                "session of AutoDist it is not asked then: they are where they would "
                "be without a strategy. Their values are the same.",
                ", ".join(sorted(made)),
            )
        return made

    def _mirror(self, names: Mapping[str, str]) -> None:
        """Gives each replica a component of some variables, given why."""
        needs = []
        for name, why in names.items():
            line = errors.line_of(self.program.variables[name].op)
            needs.append(storage.Need(self._variables[name], why, line))
        with tf.name_scope(f"{_VARIABLES}/mirrored"):
            storage.mirror_all(needs)

    def _handle(self, program: Program, tensor: tf.Tensor, r: int) -> tf.Tensor | None:
        """Returns replica r's handle of the variable that a tensor stands for."""
        original = program.variable_behind(tensor)
        if original is None:
            return None
        variable = self._variables[original.op.name]
        if self._finished:  # there are no aliases any more
            return variable.components[self._settings.world.place(r)].handle
        return variable.placement.handle_on(variable, r, self._build.aliases)

    # --- Copies -----------------------------------------------------------------------

    def _share(self, program: Program) -> None:
        """Copies what is there once."""
        _tf.copy_functions(program.graph, self.graph)
        stamp = stamping.Stamp(program.graph, program.imported)

        def given(tensor: tf.Tensor) -> tf.Tensor:
            original = program.variable_behind(tensor)
            if original is None:
                return _of(self.places[0], tensor)
            return self._variables[original.op.name].components[0].handle

        new = stamp.press(
            self.graph, "", given, lambda op: op.device, dict(self.places[0])
        )
        for places in self.places:
            places.update(new)

    def _copy(self, program: Program) -> list[list[tf.Operation]]:
        """Copies what each replica has; returns the ops of each."""
        stamp = stamping.Stamp(program.graph, program.copied)
        own = []
        for r, places in zip(self._settings.world.local, self.places, strict=True):
            device = self._settings.world.device(r)

            def given(tensor: tf.Tensor, r: int = r, places: Places = places) -> Any:
                handle = self._handle(program, tensor, r)
                return _of(places, tensor) if handle is None else handle

            def placed(op: tf.Operation, r: int = r, device: str = device) -> str:
                return self._placed(program, op, r, device)

            scope = f"{PREFIX}{r}/" if r else ""

            def called(op: tf.Operation, name: str, r: int = r) -> str:
                return self._bodies.copy(op, name, r)

            places.update(
                stamp.press(self.graph, scope, given, placed, dict(places), called)
            )
            own.append([places[op] for op in stamp.ops])
        return own

    def _placed(self, program: Program, op: tf.Operation, r: int, device: str) -> str:
        """Returns where replica r has an op.

        What the user has put on a device of the replicas' kind is meant for the one
        device that there was.
        """
        for _, tensor in resource_inputs(op):
            variable = program.variable_behind(tensor)
            if variable is not None and not _calls(op):
                owner = self._variables[variable.op.name].placement.owner
                return self._settings.world.device(r if owner is None else owner)
            if tensor.op in program.shared:
                return op.device  # TensorFlow puts it where the resource is
        if not op.device:
            return device
        own, asked = _spec(device), _spec(op.device)
        if asked.device_type in (None, own.device_type):
            return device
        return own.replace(
            device_type=asked.device_type, device_index=asked.device_index
        ).to_string()

    def _deal(self, program: Program) -> None:
        """Has replicas take elements one after the other, in their order."""
        for op in program.copied:
            if ELEMENTS.fullmatch(op.type):
                column = [places[op] for places in self.places]
                for before, after in itertools.pairwise(column):
                    _tf.add_control_inputs(after, [before])

    # --- Communication ----------------------------------------------------------------

    def _finish(self, own: list[list[tf.Operation]], start: int) -> None:
        """Has the replicas communicate, and runs the passes."""
        program, plan = self.program, self.plan
        for n, r in enumerate(self._settings.world.local):
            self._communicate(plan, n, r)
        count = len(own[0])
        # What was added for the communication belongs to the replicas, too.
        added = self._added(own, start)
        draft = Draft(
            self._settings,
            lambda: None,
            None,
            self._build,
            tuple,
            returned=[[] for _ in own],
            ranges=[(start, start)],
            replicas=[[*ops, *more] for ops, more in zip(own, added, strict=True)],
        )
        for apply in _PASSES:
            try:
                apply(draft)
            except context.BuildAgain:
                raise _Again(self._moved()) from None
            except errors.ReplicatorError as error:
                raise refusals.of_user(error, _VARIABLES) from error
        self.communications = draft.communications
        for n, places in enumerate(self.places):
            replaced = draft.replicas[n][:count]
            places.update(zip(program.copied, replaced, strict=True))
            places.update(self._reduced[n])
        freshness.read_first(program, self.places)

    def _moved(self) -> dict[str, str]:
        """Returns the variables that have been given components, and why."""
        whys = {name: v.storage.why_mirrored for name, v in self._variables.items()}
        return {name: why for name, why in whys.items() if why is not None}

    def _communicate(self, plan: shares.Plan, n: int, r: int) -> None:
        """Puts the communication of one replica into its copy."""
        replica = context.ReplicaContext(self._build, r, scope=f"{PREFIX}{r}/")
        device = self._settings.world.device(r)
        before = _tf.operation_count(self.graph)
        with context.building(replica), tf.device(device), tf.name_scope("AutoDist"):
            self.shares.scale(plan, self.places, n)
            made = agreement.Agreement(
                self.program, plan, self.shares, self._variables, self.places, n
            )
            for group in plan.gradients:
                self._reduced[n].update(made.reduce(group))
            for write in plan.writes:
                made.agree(write)
        self._parts[n] = (before, _tf.operation_count(self.graph))

    def _added(
        self, own: Sequence[Sequence[tf.Operation]], start: int
    ) -> list[list[tf.Operation]]:
        ops = self.graph.get_operations()
        aliases = self._build.aliases.ops()
        return [
            [op for op in ops[slice(*self._parts[n])] if op not in aliases]
            for n in range(len(own))
        ]


def _of(places: Places, tensor: tf.Tensor) -> tf.Tensor:
    return places[tensor.op].outputs[tensor.value_index]


@functools.lru_cache(maxsize=64)
def _spec(device: str) -> tf.DeviceSpec:
    """Returns a device's name in parts; it is asked for of each op of each replica."""
    return tf.DeviceSpec.from_string(device)


def _calls(op: tf.Operation) -> bool:
    return kind_of(op).calls and bool(_tf.called_graphs(op))
