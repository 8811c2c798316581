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

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import _tf, context, errors
from replicator.autodist import (
    agreement,
    bodies,
    cuts,
    freshness,
    owned,
    proxies,
    refusals,
    shares,
    stamping,
    uses,
    variables,
)
from replicator.autodist.divided import Divided
from replicator.autodist.program import ELEMENTS, Program
from replicator.autodist.stamping import Places
from replicator.autodist.variables import Variables
from replicator.graph.passes import owners
from replicator.primitives import table
from replicator.step import passes
from replicator.step.draft import Draft, Settings

PREFIX = "AutoDist-Replica-"
_PASSES: tuple[Callable[[Draft], None], ...] = (
    passes.check_effects,
    passes.answer_messages,
    passes.check_equality,
    passes.lower,
    passes.check_leftovers,
)


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
    """Returns all replicas of a single-device graph; see `Replicas`.

    Where nothing makes what parts of the batch give that of one device, each has all.
    """
    decided = cuts.decide(program, settings.chooser)
    try:
        made = _replicated(program, settings, loss, decided)
    except errors.UnsupportedError as error:
        whole = program.unsplit()
        if whole is None:
            raise
        try:
            made = _replicated(whole, settings, loss, decided)
        except errors.ReplicatorError:
            raise error from None
        if settings.world.num_replicas > 1:
            logging.warning("%s", refusals.unsplit("what sessions are fed", error))
    made.warn()
    return made


def _replicated(
    program: Program, settings: Settings, loss: str | None, decided: cuts.Decided
) -> Replicas:
    plan, divided = shares.Plan(program, loss), None
    if decided.cuts:
        writes = [write.op for write in plan.writes]
        divided = Divided(program, decided, writes)
    source = program if divided is None else divided.program
    mirrored = uses.needing_components(source)
    while True:
        try:
            return Replicas(program, settings, mirrored, loss, plan, decided, divided)
        except _Again as again:
            known = len(mirrored)
            mirrored.update(again.mirrored)
            if len(mirrored) == known:
                lines = {
                    name: errors.line_of(source.variables[name].op)
                    for name in again.mirrored
                }
                raise refusals.unbuildable(again.mirrored, lines) from None


class Replicas:
    """All replicas of a single-device graph, in a graph of their own.

    Args:
        program: The single-device graph.
        settings: The devices, and what all steps on them share.
        mirrored: The names of variables of which each replica needs a component, and
            what for.
        loss: What the user says that losses are, "mean" or "sum", if anything.
        plan: What is known of its values.
        decided: What a strategy says of its variables.
        divided: The graph with variables in parts, if there are any.

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
        loss: str | None,
        plan: shares.Plan,
        decided: cuts.Decided,
        divided: Divided | None,
    ) -> None:
        self._settings, self.program, self._loss = settings, program, loss
        self.plan, self._decided, self._divided = plan, decided, divided
        world = settings.world
        self.graph = tf.Graph()
        self.places: list[Places] = [{} for _ in world.local]
        self._parts: dict[int, tuple[int, int]] = {}
        self._reduced: list[Places] = [{} for _ in world.local]
        kind = tf.DeviceSpec.from_string(world.devices[0]).device_type
        self._bodies = bodies.Bodies(kind)
        self._finished = False
        self._once: dict[tf.Operation, int] = {}  # of which one copy is everyone's
        source = self._source
        with self.graph.as_default():
            self._variables = Variables(source, settings, decided)
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
            self._variables.mirror(source, mirrored)
            self._build.aliases.make(self._variables.owned(), world.local)
            self.shares = shares.Shares(world)
            self._share(source)
            start = _tf.operation_count(self.graph)
            own = self._copy(source)
            self._deal(source)
            self._finish(source, own, start)
        self._finished = True

    @property
    def _source(self) -> Program:
        """What is copied for each replica: the program, or that with parts."""
        return self.program if self._divided is None else self._divided.program

    def _note_places(self) -> None:
        """Notes what the user's ops are, where others are copied in their places."""
        if self._divided is None:
            return
        pairs = list(self._divided.places.items())
        for places in self.places:
            for original, op in pairs:
                if op in places:
                    places[original] = places[op]

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
            if name not in self.program.variables
        ]
        late += program.markers + [write.op for write in plan.writes]
        if late:
            raise refusals.too_late(late[0])
        with self.graph.as_default():
            self.program, self.plan = program, plan
            if self._divided is not None:
                self._divided.extend(program)
            source = self._source
            self._share(source)
            self._copy(source)
            self._deal(source)
            self._note_places()
            for n in range(len(self.places)):  # gradients by what is no variable
                self.shares.scale(plan, self.places, n)
            freshness.keep_owners_writes(source, self.places, self._variables.owner_of)
            self._order(source)

    @property
    def devices(self) -> tuple[str, ...]:
        """Where the replicas are."""
        return self._settings.world.devices

    def counts(self, source: tf.Operation) -> list[tf.Tensor]:
        """Returns how many examples each replica has been dealt, as floats."""
        with self.graph.as_default():
            return self.shares.counts(source, self.places)

    def whole(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns what a tensor is for all examples, or None if that is not computed.

        Args:
            tensor: One of the program.
        """
        with self.graph.as_default():
            return self.shares.joined(tensor, self.plan, self.places, 0)

    def trained(self) -> dict[str, Any]:
        """Returns the variables that a strategy decides on, by the user's names."""
        return cuts.trained(self.program, self._decided, self._variables.made)

    def warn(self) -> None:
        """Says which variables are not where a strategy has them, and why."""
        for name, why in self._variables.moved().items():
            if name in self._decided.chosen:
                logging.warning(
                    "%s is on all replicas, and not where the strategy has it: %s. "
                    "Its values are the same.",
                    *(name, why),
                )

    # --- Copies -----------------------------------------------------------------------

    def _share(self, program: Program) -> None:
        """Copies what is there once."""
        _tf.copy_functions(program.graph, self.graph)
        stamp = stamping.Stamp(program.graph, program.imported)

        def given(tensor: tf.Tensor) -> tf.Tensor:
            variable = self._variables.behind(program, tensor)
            if variable is None:
                return stamping.of(self.places[0], tensor)
            handle: tf.Tensor = variable.storage.first.handle
            return handle

        new = stamp.press(
            self.graph, "", given, lambda op: op.device, dict(self.places[0])
        )
        for places in self.places:
            places.update(new)

    def _copy(self, program: Program) -> list[list[tf.Operation]]:
        """Copies what each replica has; returns the ops of each."""
        stamp = stamping.Stamp(program.graph, program.copied)
        own, made = [], self._variables
        once = self._once = {} if self._finished else owned.find(program, made)
        aliases = None if self._finished else self._build.aliases

        def at_owner(tensor: tf.Tensor) -> str:
            return made.at_owner(program, tensor)

        for n, r in enumerate(self._settings.world.local):
            places, device = self.places[n], self._settings.world.device(r)

            def given(tensor: tf.Tensor, r: int = r, places: Places = places) -> Any:
                handle = made.handle(program, tensor, r, aliases)
                return stamping.of(places, tensor) if handle is None else handle

            def placed(op: tf.Operation, device: str = device) -> str:
                return made.placed(program, op, device)

            scope = f"{PREFIX}{r}/" if r else ""

            def called(op: tf.Operation, name: str, r: int = r) -> str:
                return self._bodies.copy(op, name, r, at_owner)

            left = {op for op, owner in once.items() if owner != n}
            others = dict(places)
            places.update(
                stamp.press(self.graph, scope, given, placed, others, called, left)
            )
            own.append([places[op] for op in stamp.ops if op not in once])
        owned.share(once, self.places)
        return own

    def _deal(self, program: Program) -> None:
        """Has replicas take elements one after the other, in their order."""
        for op in program.copied:
            if ELEMENTS.fullmatch(op.type):
                column = [places[op] for places in self.places]
                for before, after in itertools.pairwise(column):
                    _tf.add_control_inputs(after, [before])

    # --- Communication ----------------------------------------------------------------

    def _finish(
        self, source: Program, own: list[list[tf.Operation]], start: int
    ) -> None:
        """Has the replicas communicate, and runs the passes."""
        plan = self.plan
        self._note_places()
        for n, r in enumerate(self._settings.world.local):
            self._communicate(plan, n, r)
        count = len(own[0])
        # What was added for the communication belongs to the replicas, too.
        added = self._added()
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
                raise _Again(self._variables.moved()) from None
            except errors.ReplicatorError as error:
                raise refusals.of_user(error, variables.SCOPE) from error
        copied = [op for op in source.copied if op not in self._once]
        for n, places in enumerate(self.places):
            replaced = draft.replicas[n][:count]
            places.update(zip(copied, replaced, strict=True))
            places.update(self._reduced[n])
        self._order(source)

    def _order(self, source: Program) -> None:
        """Has reads come before updates, and copies be as what they are copies of."""
        freshness.read_first(source, self.places)
        devices = self._settings.world.devices
        proxies.keep_up(source, self.places, self._variables.made, devices)
        self._note_places()

    def _communicate(self, plan: shares.Plan, n: int, r: int) -> None:
        """Puts the communication of one replica into its copy."""
        replica = context.ReplicaContext(self._build, r, scope=f"{PREFIX}{r}/")
        device = self._settings.world.device(r)
        before = _tf.operation_count(self.graph)
        with context.building(replica), tf.device(device), tf.name_scope("AutoDist"):
            self.shares.scale(plan, self.places, n)
            made = agreement.Agreement(
                *(self.program, plan, self.shares, self._variables.made),
                *(self.places, n, self._divided),
            )
            for group in plan.gradients:
                self._reduced[n].update(made.reduce(group))
            for write in plan.writes:
                made.agree(write)
        self._parts[n] = (before, _tf.operation_count(self.graph))

    def _added(self) -> list[list[tf.Operation]]:
        """Returns what each replica's communication consists of."""
        ops = self.graph.get_operations()
        aliases = self._build.aliases.ops()
        return [
            [op for op in ops[slice(*self._parts[n])] if op not in aliases]
            for n in range(len(self.places))
        ]
