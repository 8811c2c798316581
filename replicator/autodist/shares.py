# SPDX-License-Identifier: Apache-2.0
"""How many of the examples each replica has, and what its gradients weigh for that.

A loss that is a mean over a replica's examples counts by its share of all examples, so
that the sum of what the replicas compute is the mean over all. A loss that is a sum
counts as it is. The share multiplies what tf.gradients starts from, one number, and not
each gradient.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from replicator import _tf, errors
from replicator.autodist import losses, marked
from replicator.autodist.kinds import Kind
from replicator.autodist.losses import Loss
from replicator.autodist.program import ELEMENTS, Program
from replicator.autodist.stamping import Places
from replicator.autodist.values import Values
from replicator.graph.ir import switching
from replicator.world import World

_STARTS = re.compile(r"(|.*/)grad_ys_\d+")
_WRITERS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
Source: TypeAlias = tf.Operation | None  # what deals the elements; None: what is fed


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient of a variable.

    Attributes:
        variable: The variable's name.
        ops: Its marker; two of them, of values and indices, if it is sparse.
    """

    variable: str
    ops: tuple[tf.Operation, ...]


@dataclasses.dataclass(frozen=True)
class Write:
    """A write of a value that differs between replicas.

    Attributes:
        op: Writes it.
        kind: What the value is.
    """

    op: tf.Operation
    kind: Kind


class Plan:
    """Where the replicas of a program communicate.

    Args:
        program: The single-device graph.
        declared: What the user says that losses are, "mean" or "sum", if anything.

    Attributes:
        kinds: What values are when the examples are split.
        gradients: Those that are reduced together.
        starts: What tf.gradients starts from, with what it differentiates.
        writes: Those of values that differ.

    Raises:
        UnsupportedError: A loss is of a kind that nothing can be made equal of.
    """

    def __init__(self, program: Program, declared: str | None = None) -> None:
        self._program, self._declared = program, declared
        self._known: dict[str, Loss] = {}
        self.kinds = Values(program.flow)
        self._dealt = {
            op: program.downstream(op)
            for op in program.copied
            if ELEMENTS.fullmatch(op.type)
        }
        self.gradients = _grouped(program.markers)
        self._targets = {
            marked.text(op, marked.TAKEN) or "": marked.text(op, marked.LOSS) or ""
            for op in program.markers
        }
        self.starts = [
            (op, self._loss(op)) for op in program.copied if _STARTS.fullmatch(op.name)
        ]
        self._begun: dict[str, list[Loss]] = {}
        for op, loss in self.starts:
            self._begun.setdefault(op.name.rpartition("/")[0], []).append(loss)
        # Where a replica has nothing to divide by, only its gradient can be left out.
        self.starts = [
            (op, loss)
            for op, loss in self.starts
            if not _is_late(self._begun[op.name.rpartition("/")[0]])
        ]
        self.writes = self._find_writes()

    def source(self, op: tf.Operation) -> Source:
        """Returns what deals the elements that an op depends on."""
        return next((s for s, found in self._dealt.items() if op in found), None)

    def loss_behind(self, gradient: Gradient) -> Loss | None:
        """Returns what a gradient is of; None if that was weighed before.

        Raises:
            UnsupportedError: It is not known.
        """
        taken = marked.text(gradient.ops[0], marked.TAKEN) or ""
        begun = self._begun.get(taken.removesuffix("/")) if taken else None
        if begun is None:
            return self._of_tape(gradient)
        return begun[0] if _is_late(begun) else None

    def _loss(self, start: tf.Operation) -> Loss:
        """Returns what tf.gradients differentiates from a start on."""
        scope, _, k = start.name.rpartition("grad_ys_")
        names = self._targets.get(scope, "").partition(";")[0].split(",")
        if int(k) < len(names) and names[int(k)]:
            target: tf.Tensor | None = self._tensor(names[int(k)])
        else:  # gradients of what is no variable
            target = _differentiated(self._program.graph, start)
        if target is None:
            return Loss(Kind.MEAN)
        return losses.find(self.kinds, [target], [None], self._declared)

    def _of_tape(self, gradient: Gradient) -> Loss:
        """Returns what a tape differentiated to get a gradient."""
        names = marked.text(gradient.ops[0], marked.LOSS)
        if not names:
            line = errors.line_of(gradient.ops[0])
            raise losses.not_found(gradient.variable, line)
        if names not in self._known:
            targets, given = (
                [name and self._tensor(name) for name in part.split(",")]
                for part in names.split(";")
            )
            given = [one if one != "" else None for one in given]
            found = losses.find(self.kinds, targets, given, self._declared)
            self._known[names] = found
        return self._known[names]

    def _tensor(self, name: str) -> tf.Tensor:
        tensor: tf.Tensor = self._program.graph.get_tensor_by_name(name)
        return tensor

    def _find_writes(self) -> list[Write]:
        program = self._program
        differing = program.differing()
        initializers = {one.initializer for one in program.variables.values()}
        flow = switching.Flow(program.graph.get_operations()[: program.count])
        return [
            Write(op, self.kinds.of(op.inputs[1]))
            for op in program.copied
            if op.type in _WRITERS
            and op not in initializers
            and op not in flow
            and op.inputs[1].op in differing
            and program.variable_behind(op.inputs[0]) is not None
        ]


class Shares:
    """How many examples each replica has, as tensors of its own.

    Args:
        world: The replicas.

    Attributes:
        shares: `shares[n]` is replica n's part of what is fed, 1/R where nothing is
            split; fed by the session.
        parts: `parts[n]` is what a sum over replica n's examples counts: 1 where
            something is split, 0 for one that has none of it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._dealt: dict[tf.Operation, list[tf.Tensor]] = {}
        self.shares: list[tf.Tensor] = []
        self.parts: list[tf.Tensor] = []
        for device in world.devices:
            with tf.device(device), tf.name_scope("AutoDist"):
                equal = tf.constant(1 / world.num_replicas)
                make = tf.compat.v1.placeholder_with_default
                self.shares.append(make(equal, [], "share"))
                self.parts.append(make(equal, [], "part"))

    def weight(
        self, source: Source, what: Loss, places: Sequence[Places], n: int
    ) -> tf.Tensor:
        """Returns what a value of replica n is multiplied by before all are added up.

        Args:
            source: What deals the elements it depends on.
            what: What it is.
            places: What the ops of the program are on each replica.
            n: The replica.
        """
        sums = what.kind in (Kind.SUM, Kind.COUNT)
        if what.over is not None:
            return self._part_of(source, what.over, places, n)
        if source is None:
            return self.parts[n] if sums else self.shares[n]
        if sums:
            return tf.constant(1.0)
        counts = self.counts(source, places)
        with tf.device(self._world.devices[n]):
            return counts[n] / tf.add_n(counts)

    def _part_of(
        self, source: Source, over: tf.Tensor, places: Sequence[Places], n: int
    ) -> tf.Tensor:
        """Returns replica n's part of a sum over all examples."""
        own = []
        for place, part in zip(places, self.parts, strict=True):
            total = tf.cast(place[over.op].outputs[over.value_index], tf.float32)
            own.append(total if source is not None else total * part)
        with tf.device(self._world.devices[n]):
            return tf.math.divide_no_nan(own[n], tf.add_n(own))

    def counts(self, source: tf.Operation, places: Sequence[Places]) -> list[tf.Tensor]:
        """Returns how many examples each replica has been dealt, as floats."""
        if source not in self._dealt:
            k = _examples_of(source)
            self._dealt[source] = made = []
            for own, device in zip(places, self._world.devices, strict=True):
                with tf.device(device), tf.name_scope("AutoDist"):
                    count = tf.constant(1.0)
                    if k is not None:
                        element = own[source].outputs[k]
                        count = tf.cast(tf.shape(element)[0], tf.float32)
                    made.append(count)
        return self._dealt[source]

    def scale(self, plan: Plan, places: Sequence[Places], n: int) -> None:
        """Weighs what tf.gradients starts from on replica n."""
        for op, loss in plan.starts:
            start = places[n][op].outputs[0]
            used = [
                (consumer, k)
                for consumer in start.consumers()
                for k, tensor in enumerate(consumer.inputs)
                if tensor is start
            ]
            source = next(
                (s for c in op.outputs[0].consumers() if (s := plan.source(c))), None
            )
            weight = self.weight(source, loss, places, n)
            scaled = start * tf.cast(weight, start.dtype)
            for consumer, k in used:
                _tf.set_input(consumer, k, scaled)


def _is_late(begun: Sequence[Loss]) -> bool:
    """Whether gradients, and not what tf.gradients starts from, are weighed."""
    return len(begun) == 1 and begun[0].over is not None


def _grouped(markers: Sequence[tf.Operation]) -> list[list[Gradient]]:
    """Returns the gradients that one call of tf.gradients takes, each with the others.

    None of them depends on another: what they lead to are handles.
    """
    groups: dict[object, list[Gradient]] = {}
    waiting = None
    for op in markers:
        if marked.text(op, marked.PART) == "values":
            waiting = op
            continue
        ops = (op,) if waiting is None else (waiting, op)
        waiting = None
        name = marked.text(op, marked.GRADIENT)
        assert name is not None, "it is a marker"
        key = marked.text(op, marked.TAKEN) or op
        groups.setdefault(key, []).append(Gradient(name, ops))
    return list(groups.values())


def _differentiated(graph: tf.Graph, start: tf.Operation) -> tf.Tensor | None:
    """Returns what is differentiated from a start on, by the names of gradients."""
    scope = start.name.rpartition("grad_ys_")[0]
    for consumer in start.outputs[0].consumers():
        rest = consumer.name.removeprefix(scope)
        place = rest.find("_grad/")
        while place >= 0:
            try:
                op = graph.get_operation_by_name(rest[:place])
            except KeyError:
                place = rest.find("_grad/", place + 1)
                continue
            return op.outputs[0] if op.outputs else None
    return None


def _examples_of(source: tf.Operation) -> int | None:
    """Returns which part of an element has a row for each example, if one has."""
    for unknown in (True, False):
        for k, tensor in enumerate(source.outputs):
            shape = tensor.shape
            if tensor.dtype in (tf.resource, tf.variant) or not shape.rank:
                continue
            if (shape[0] is None) == unknown:
                return k
    return None
