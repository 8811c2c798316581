# SPDX-License-Identifier: Apache-2.0
"""Checks that no write in a step makes the replicas' components drift apart.

Runs once the calls of all replicas are known to pair, before anything is rewired. Where
replicas agreed on a value while they were built, `agreement` has taken care of it. The
other writes are compared here, variable by variable, also inside control flow: that all
replicas write it equally often and by the same methods, and that values written by an
optimizer, or by an op that is no method of the variable, are equal by construction.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence, Set
from typing import Any, NoReturn

import tensorflow as tf

from replicator import context, errors
from replicator.graph.ir.kinds import kind_of
from replicator.graph.order import effects
from replicator.graph.same import levels
from replicator.graph.same.levels import Level, Ops
from replicator.variables import agreement, copies, doubts
from replicator.variables.creation import VariableFactory
from replicator.variables.replicated import ReplicatedVariable

_EQUAL = (
    "compute values that differ outside the optimizer, and make them equal on all "
    "replicas with repl.broadcast or repl.all_reduce; for equal random numbers, use "
    "tf.random.stateless_normal and the like with equal seeds."
)


def check(
    factory: VariableFactory,
    build: context.Build,
    replicas: Sequence[Sequence[tf.Operation]],
    initializers: Set[tf.Operation],
    own: Container[int] | None = None,
    dividing: Set[tf.Operation] = frozenset(),
) -> list[tuple[str, str, str]]:
    """Raises if a step could make the replicas' variables drift apart.

    Args:
        factory: The factory that created the variables.
        build: The build.
        replicas: The ops of each replica that may use resources or have effects.
        initializers: Ops that initialize variables, which are no part of the step.
        own: If other processes build all other replicas: the ids of the tensors that
            are passed to this replica alone.
        dividing: The ops that give each replica its examples of a global batch.

    Returns:
        For each write the variable's name, the line, and a digest of the written value;
        all processes get the same list.

    Raises:
        ContextError: A write is not equal on all replicas by construction.
        MismatchError: The replicas write a variable different numbers of times, or by
            different methods.
        BuildAgain: What an optimizer writes has to be aggregated, or integers that may
            differ have to be compared, so the build starts over.
    """
    handles = {**factory.owners(), **build.aliases.recorded()}
    variables: dict[str, Any] = {}

    def variable_of(handle: tf.Tensor) -> Any:
        # An assignment returns another object for the same variable.
        variable = handles.get(id(handle))
        if variable is None:
            return None
        return variables.setdefault(variable.key, variable)

    acting = [[op for op in ops if op not in initializers] for ops in replicas]
    world = build.world
    between = bool(world.processes)
    level = levels.of_step(acting, variable_of, world.num_replicas, own, between)
    checker = _Checker(build, dividing)
    checker.compare(level, None)
    if checker.found:
        build.knowledge.update(dict.fromkeys(checker.found, True))
        raise context.BuildAgain
    doubts.tell(build, level)
    return checker.equal


class _Checker:
    """Compares the writes of all replicas, level by level.

    Attributes:
        found: What the next build has to know, to aggregate or compare writes that may
            differ.
        equal: What `check` returns.
    """

    def __init__(self, build: context.Build, dividing: Set[tf.Operation]) -> None:
        self._build = build
        self._dividing = dividing
        self.equal: list[tuple[str, str, str]] = []
        self._claims: dict[tf.Graph, dict[tf.Operation, effects.Claim | None]] = {}
        self.found: set[Any] = set()

    def compare(
        self, level: Level, around: effects.Claim | None, choice: Ops | None = None
    ) -> None:
        """Raises unless all writes in a level leave the components equal.

        Args:
            level: The ops of all replicas.
            around: The claim on the control flow around the level.
            choice: The ops by which only some replicas may come to the level, or some
                more often; None if all come to it alike.
        """
        seen: set[Ops] = set()
        for key, variable in level.resources.items():
            if not _must_be_equal(variable):
                continue
            columns = [writes.get(key, []) for writes in level.writes]
            for ops in itertools.zip_longest(*columns):
                if None in ops or len({op.type for op in ops}) > 1:
                    self._refuse_mismatch(level, key, ops, around)
                if not kind_of(ops[0]).calls:
                    self._check_write(level, variable, ops, around)
                elif ops not in seen:
                    seen.add(ops)
                    self._check_inside(level, variable, ops, around, choice)

    def _claim(
        self, op: tf.Operation, around: effects.Claim | None
    ) -> tuple[bool, effects.Claim | None]:
        """Returns whether the replicas agreed on a write, and the claim it is under."""
        claims = self._claims_of(op.graph)
        if op in claims:
            claim = claims[op]
            agreed = claim is None or claim.proven
            return agreed, None if agreed else claim
        return False, around

    def _claims_of(self, graph: Any) -> dict[tf.Operation, effects.Claim | None]:
        if graph not in self._claims:
            self._claims[graph] = self._build.ledger.claims(graph)
        return self._claims[graph]

    def _is_proven(self, op: tf.Operation) -> bool:
        claim = self._claims_of(op.graph).get(op)
        return claim is not None and claim.proven

    def _check_write(
        self,
        level: Level,
        variable: ReplicatedVariable,
        ops: Ops,
        around: effects.Claim | None,
    ) -> None:
        if self._build.world.processes:
            digest = level.digest(ops[0])
            self.equal.append((variable.name, errors.line_of(ops[0]), digest))
        copies.check(self._build, variable, ops)
        claims = [self._claim(op, around) for op in ops]
        if all(agreed for agreed, _ in claims):
            is_proven = all(map(self._is_proven, ops))
            if agreement.is_taken_as_equal(variable) and not is_proven:
                self._doubt(variable, ops, level.difference_of_inputs(ops))
            return
        claim = next((claim for _, claim in claims if claim is not None), None)
        if claim is not None and claim.wrapped and variable.placement.owner is not None:
            return  # of all replicas' updates, only the owner's is kept
        different = level.difference_of_inputs(ops)
        if different is not None:
            self._settle(variable, ops, claim, different)

    def _check_inside(
        self,
        level: Level,
        variable: ReplicatedVariable,
        ops: Ops,
        around: effects.Claim | None,
        choice: Ops | None,
    ) -> None:
        """Checks conditionals, loops or function calls that contain writes."""
        agreed, claim = self._claim(ops[0], around)
        bodies = level.bodies(ops)
        if not bodies:
            self._settle(variable, ops, claim, ops)
        doubted = any(map(self._believes, level.resources.values()))
        if choice is None and (doubted or not agreed):
            choice = level.difference_of_choice(ops)
        for body in bodies:
            if choice is not None:
                self._check_choice(body, choice, claim)
            self.compare(body, claim, choice)

    def _believes(self, variable: Any) -> bool:
        """Whether values are assumed to be equal, without a comparison in each step."""
        return (
            _must_be_equal(variable)
            and agreement.is_taken_as_equal(variable)
            and not agreement.is_compared(variable, self._build)
        )

    def _check_choice(
        self, body: Level, choice: Ops, around: effects.Claim | None
    ) -> None:
        """Settles writes in a branch that only some replicas may take.

        Writes that the replicas communicate about are excepted.
        """
        for key, variable in body.resources.items():
            if not _must_be_equal(variable):
                continue
            for ops in zip(
                *(writes.get(key, []) for writes in body.writes), strict=False
            ):
                agreed, claim = self._claim(ops[0], around)
                if kind_of(ops[0]).calls:
                    continue
                if not agreed:
                    self._settle(variable, ops, claim, choice)
                elif agreement.is_taken_as_equal(variable) and not all(
                    map(self._is_proven, ops)
                ):
                    self._doubt(variable, ops, choice)

    def _doubt(
        self, variable: ReplicatedVariable, ops: Ops, different: Ops | None
    ) -> None:
        """Has written values without a mean compared in each step if they may differ.

        Those that differ by the examples are refused, whatever they are in a batch: the
        values of one device are computed from all examples.
        """
        if different is None:
            return
        if self._believes(variable):
            self.found.add((agreement.DOUBTED, variable.key))
        if self._dividing.isdisjoint(different):
            return
        name, dtype = variable.name, variable.dtype.name
        raise errors.ContextError(
            f"variable {name} has no aggregation, {dtype} has no mean, and what each "
            "replica assigns to it depends on its own examples of the batch.",
            errors.sites_of_ops(ops, self._build.compared),
            "assign what is computed from all examples, e.g. "
            'repl.all_reduce(value, "sum") or "max" in place of the value; or give '
            "it an aggregation, tf.VariableAggregation.SUM for example. A function "
            "that is written for whole batches runs unchanged by "
            "AutoDist.function.",
        )

    def _settle(
        self,
        variable: ReplicatedVariable,
        ops: Ops,
        claim: effects.Claim | None,
        different: Ops,
    ) -> None:
        """Requests that a write that may differ be aggregated, or refuses it."""
        key = (agreement.UNEVEN, variable.key)
        has_mean = variable.dtype.is_floating or variable.dtype.is_complex
        by_method = not ops[0].type.startswith("ResourceApply")
        if (
            claim is not None
            and claim.wrapped
            and has_mean
            and by_method
            and key not in self._build.knowledge
        ):
            self.found.add(key)
            return
        sites = errors.sites_of_ops(ops, self._build.compared)
        sites += _differ_by(different, self._build.compared)
        if claim is None:
            self._refuse_op(variable, ops, sites)
        if claim.wrapped:
            problem = (
                f"the optimizer {claim.optimizer} writes variable {variable.name} by "
                f"{ops[0].type}, with values that may differ between the replicas: "
                "they would drift apart."
            )
            fix = _EQUAL
        else:
            problem = (
                f"the optimizer {claim.optimizer} updates variable {variable.name} in "
                "a step, was not wrapped, and is given gradients that are not equal on "
                "all replicas by construction."
            )
            fix = (
                "wrap it once, where you create it: "
                "optimizer = repl.wrap_optimizer(optimizer); or all_reduce its "
                "gradients in the step."
            )
        raise errors.ContextError(problem, sites, fix)

    def _refuse_op(
        self, variable: ReplicatedVariable, ops: Ops, sites: Sequence[str]
    ) -> NoReturn:
        raise errors.ContextError(
            f"replica 0 writes variable {variable.name} by {ops[0].type}, after which "
            "the replicas would drift apart.",
            sites,
            "wrap the optimizer, repl.wrap_optimizer(optimizer); or write it by one of "
            "the variable's own methods, assign, assign_add, ...; or make the value "
            "equal on all replicas, with repl.all_reduce for example.",
        )

    def _refuse_mismatch(
        self,
        level: Level,
        key: int,
        ops: tuple[tf.Operation | None, ...],
        around: effects.Claim | None,
    ) -> NoReturn:
        """Raises because one replica makes a write that another does not."""
        variable = level.resources[key]
        sites = []
        for r, op, writes in zip(self._build.compared, ops, level.writes, strict=True):
            site = f"replica {r}: {len(writes.get(key, ()))} writes"
            if op is not None:
                site += f", here {op.type} {_at(op)}"
            elif extra := _alone(level, writes):
                site += f"; it writes {extra[0]} by {extra[1].type} "
                site += f"{_at(extra[1])}"
            sites.append(site)
        write_op = next(op for op in ops if op is not None)
        _, claim = self._claim(write_op, around)
        if claim is not None and not claim.wrapped:
            raise errors.ContextError(
                f"the optimizer {claim.optimizer} updates variable {variable.name} on "
                "some replicas only, and was not wrapped.",
                sites,
                "let every replica apply it, and wrap it where you create it: "
                "optimizer = repl.wrap_optimizer(optimizer).",
            )
        difference = (
            "different numbers of times" if None in ops else "by different methods"
        )
        raise errors.MismatchError(
            f"the replicas write variable {variable.name} {difference}: they would "
            "drift apart.",
            sites,
            "let every replica make the same assignments, in the same branches.",
        )


def _alone(
    level: Level, writes: Mapping[int, Sequence[tf.Operation]]
) -> tuple[str, tf.Operation] | None:
    """Returns a variable that a replica writes more often than others, and its op."""
    for key, ops in writes.items():
        fewest = min(len(other.get(key, ())) for other in level.writes)
        variable = level.resources[key]
        if len(ops) > fewest and isinstance(variable, ReplicatedVariable):
            return variable.name, ops[fewest]
    return None


def _at(op: tf.Operation) -> str:
    return f"at {errors.line_of(op)}"


def _differ_by(ops: Ops, replica_ids: Sequence[int]) -> list[str]:
    """Returns the error's lines that say by which ops values differ."""
    if len({(op.type, _at(op)) for op in ops}) == 1:
        return [f"the values differ by {ops[0].type} ({ops[0].name}) {_at(ops[0])}"]
    return [
        f"replica {r}: the value is that of {op.type} ({op.name}) {_at(op)}"
        for r, op in zip(replica_ids, ops, strict=True)
    ]


def _must_be_equal(variable: Any) -> bool:
    """Whether a step must leave a variable's components equal."""
    return isinstance(variable, ReplicatedVariable) and not variable.placement.differs
