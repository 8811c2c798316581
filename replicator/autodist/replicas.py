# SPDX-License-Identifier: Apache-2.0
"""Builds the distributed graph: one copy of the single-device graph per replica.

Each variable gets one component per replica or a single owner. Replicas communicate
where the single-device graph takes the gradient of a variable; the passes that build a
step connect the copies and prove that everything they write is equal. Replica 0's ops
keep the user's names; those of replica r are under `AutoDist-Replica-r/`.

Source: the in-graph replication of AutoDist (Zhang et al. 2020), which also copies a
single-device graph.
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
    pulled,
    refusals,
    shares,
    stamping,
    uses,
    variables,
)
from replicator.autodist.divided import Divided
from replicator.autodist.program import Program
from replicator.autodist.stamping import Places
from replicator.autodist.variables import Variables
from replicator.graph.ir.kinds import resource_inputs
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
    """Restarts a build that found variables which must be mirrored.

    Attributes:
        mirrored: Maps the name of each to the reason it needs mirroring.
    """

    def __init__(self, mirrored: Mapping[str, str]) -> None:
        self.mirrored = mirrored
        super().__init__(", ".join(mirrored))


def replicate(
    program: Program, settings: Settings, loss: str | None = None
) -> Replicas:
    """Returns all replicas of a single-device graph; see `Replicas`.

    If no weighting makes results over parts of the batch equal those of one device,
    each replica computes the whole batch.
    """
    decided = cuts.decide(program, settings.chooser)
    try:
        result = _replicated(program, settings, loss, decided)
    except errors.UnsupportedError as error:
        whole = program.unsplit()
        if whole is None:
            raise
        try:
            result = _replicated(whole, settings, loss, decided)
        except errors.ReplicatorError:
            raise error from None
        if settings.world.num_replicas > 1:
            logging.warning("%s", refusals.unsplit("the batch fed to sessions", error))
    result.warn()
    return result


def _replicated(
    program: Program, settings: Settings, loss: str | None, decided: cuts.Decided
) -> Replicas:
    """Builds `Replicas`, mirroring more variables until a build succeeds."""
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
            previous_count = len(mirrored)
            mirrored.update(again.mirrored)
            if len(mirrored) == previous_count:
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
        mirrored: Maps the names of variables that need a component on each replica to
            the reason.
        loss: What the user declares losses to be, "mean" or "sum"; None if nothing.
        plan: Where replicas communicate, and how much each replica's values count.
        decided: The strategy's decisions on the variables.
        divided: The graph with partitioned variables, if there are any.

    Attributes:
        graph: The graph of all replicas.
        places: `places[r]` maps each op of the original to its copy on replica r; a
            shared op has the same copy on all.
        program: The graph that is copied.
        plan: Where replicas communicate, and how much each replica's values count.
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
        self._once: dict[tf.Operation, int] = {}  # ops with a single copy for all
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
            replica_ops = self._copy(source)
            self._deal(source)
            self._finish(source, replica_ops, start)
        self._finished = True

    @property
    def _source(self) -> Program:
        """The graph copied for each replica: the program, or its partitioned form."""
        return self.program if self._divided is None else self._divided.program

    def _note_places(self) -> None:
        """Also maps user ops that partitioning replaced to copies of the new ops."""
        if self._divided is None:
            return
        pairs = list(self._divided.places.items())
        for places in self.places:
            for original, op in pairs:
                if op in places:
                    places[original] = places[op]

    def extend(self, renewed: Callable[[Program], Program]) -> None:
        """Copies ops that the user's graph has gained since it was last read.

        Args:
            renewed: Takes the previous Program, returns the current one.

        Raises:
            UnsupportedError: The new ops include a variable, or something about which
                the replicas would have to communicate.
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
            for n in range(len(self.places)):  # gradients not by variables
                self.shares.scale(plan, self.places, n)
            freshness.keep_owners_writes(source, self.places, self._variables.owner_of)
            self._order(source)

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each replica."""
        return self._settings.world.devices

    def counts(self, source: tf.Operation) -> list[tf.Tensor]:
        """Returns how many examples each replica has been dealt, as floats."""
        with self.graph.as_default():
            return self.shares.counts(source, self.places)

    def whole(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns a tensor's value over all examples, or None if it cannot be computed.

        Args:
            tensor: A tensor of the program.
        """
        with self.graph.as_default():
            return self.shares.joined(tensor, self.plan, self.places, 0)

    def trained(self) -> dict[str, Any]:
        """Returns the variables that a strategy decides on, by the user's names."""
        return cuts.trained(self.program, self._decided, self._variables.made)

    def warn(self) -> None:
        """Warns of variables that are mirrored in spite of the strategy, and why."""
        for name, why in self._variables.moved().items():
            if name in self._decided.chosen:
                logging.warning(
                    "%s is on all replicas, not where the strategy puts it: %s. "
                    "Its values are the same.",
                    *(name, why),
                )

    # --- Copies -----------------------------------------------------------------------

    def _share(self, program: Program) -> None:
        """Copies the ops that all replicas share."""
        _tf.copy_functions(program.graph, self.graph)
        stamp = stamping.Stamp(program.graph, program.imported)

        def substitute(tensor: tf.Tensor) -> tf.Tensor:
            variable = self._variables.behind(program, tensor)
            if variable is None:
                return stamping.of(self.places[0], tensor)
            handle: tf.Tensor = variable.storage.first.handle
            return handle

        copies = stamp.press(
            self.graph, "", substitute, lambda op: op.device, dict(self.places[0])
        )
        for places in self.places:
            places.update(copies)

    def _copy(self, program: Program) -> list[list[tf.Operation]]:
        """Copies the ops that each replica has; returns the ops of each."""
        stamp = stamping.Stamp(program.graph, program.copied)
        replica_ops, replicated = [], self._variables
        once = self._once = {} if self._finished else owned.find(program, replicated)
        aliases = None if self._finished else self._build.aliases

        def at_owner(tensor: tf.Tensor) -> str:
            return replicated.at_owner(program, tensor)

        for n, r in enumerate(self._settings.world.local):
            places, device = self.places[n], self._settings.world.device(r)

            def lookup(tensor: tf.Tensor, r: int = r, places: Places = places) -> Any:
                handle = replicated.handle(program, tensor, r, aliases)
                return stamping.of(places, tensor) if handle is None else handle

            def device_of(op: tf.Operation, device: str = device) -> str:
                return replicated.placed(program, op, device)

            scope = f"{PREFIX}{r}/" if r else ""

            def body_of(op: tf.Operation, name: str, r: int = r) -> str:
                return self._bodies.copy(op, name, r, at_owner)

            skip = {op for op, owner in once.items() if owner != n}
            others = dict(places)
            places.update(
                stamp.press(self.graph, scope, lookup, device_of, others, body_of, skip)
            )
            replica_ops.append([places[op] for op in stamp.ops if op not in once])
        owned.share(once, self.places)
        return replica_ops

    def _deal(self, program: Program) -> None:
        """Makes replicas take elements one after the other, in replica order."""
        for op in program.copied:
            if pulled.pulls(op):
                column = [places[op] for places in self.places]
                handles = [
                    k
                    for k, tensor in resource_inputs(op)
                    if program.variable_behind(tensor) is None
                ]
                for before, after in itertools.pairwise(column):
                    pulled.order(before, after, handles)

    # --- Communication ----------------------------------------------------------------

    def _finish(
        self, source: Program, own: list[list[tf.Operation]], start: int
    ) -> None:
        """Adds the replicas' communication and runs the passes."""
        plan = self.plan
        self._note_places()
        for n, r in enumerate(self._settings.world.local):
            self._communicate(plan, n, r)
        count = len(own[0])
        # The ops added for communication belong to the replicas, too.
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
        """Orders reads before updates, and refreshes the copies of owned variables."""
        freshness.read_first(source, self.places)
        devices = self._settings.world.devices
        proxies.keep_up(source, self.places, self._variables.made, devices)
        self._note_places()

    def _communicate(self, plan: shares.Plan, n: int, r: int) -> None:
        """Adds one replica's communication to its copy."""
        replica = context.ReplicaContext(self._build, r, scope=f"{PREFIX}{r}/")
        device = self._settings.world.device(r)
        before = _tf.operation_count(self.graph)
        with context.building(replica), tf.device(device), tf.name_scope("AutoDist"):
            self.shares.scale(plan, self.places, n)
            agreeing = agreement.Agreement(
                *(self.program, plan, self.shares, self._variables.made),
                *(self.places, n, self._divided),
            )
            for group in plan.gradients:
                self._reduced[n].update(agreeing.reduce(group))
            for write in plan.writes:
                agreeing.agree(write)
        self._parts[n] = (before, _tf.operation_count(self.graph))

    def _added(self) -> list[list[tf.Operation]]:
        """Returns the ops of each replica's communication."""
        ops = self.graph.get_operations()
        aliases = self._build.aliases.ops()
        return [
            [op for op in ops[slice(*self._parts[n])] if op not in aliases]
            for n in range(len(self.places))
        ]
