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
from absl import logging

from replicator import _tf, errors
from replicator.autodist import marked
from replicator.autodist.kinds import Kind, Kinds
from replicator.autodist.program import ELEMENTS, Program
from replicator.autodist.stamping import Places
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

    Attributes:
        kinds: What values are when the examples are split.
        gradients: Those that are reduced together.
        starts: What tf.gradients starts from, with the kind of what it differentiates.
        writes: Those of values that differ.

    Raises:
        UnsupportedError: A loss is of a kind that nothing can be made equal of.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.kinds = Kinds(program)
        self._dealt = {
            op: program.downstream(op)
            for op in program.copied
            if ELEMENTS.fullmatch(op.type)
        }
        self.gradients = _grouped(program.markers)
        self.starts = [
            (op, self._kind_of_loss(op))
            for op in program.copied
            if _STARTS.fullmatch(op.name)
        ]
        self._weighed = {op.name.rpartition("/")[0] for op, _ in self.starts}
        self.writes = self._find_writes()

    def source(self, op: tf.Operation) -> Source:
        """Returns what deals the elements that an op depends on."""
        return next((s for s, found in self._dealt.items() if op in found), None)

    def is_weighed(self, gradient: Gradient) -> bool:
        """Whether a gradient is one of what was weighed before tf.gradients began."""
        taken = marked.text(gradient.ops[0], marked.TAKEN) or ""
        return taken.removesuffix("/") in self._weighed and bool(taken)

    def _kind_of_loss(self, start: tf.Operation) -> Kind:
        if start.outputs[0].shape.rank != 0:
            return Kind.SUM if self.kinds.has_rows(start.outputs[0]) else Kind.MEAN
        loss = _differentiated(self._program.graph, start)
        kind = Kind.MEAN if loss is None else self.kinds.of(loss)
        if loss is not None and kind is Kind.MIXED:
            raise errors.UnsupportedError(
                errors.compose(
                    f"the loss {loss.name} adds a sum over the examples to something "
                    "that is none: no weight of a replica's gradient makes the sum of "
                    "all replicas' that of one device.",
                    [f"at {errors.line_of(loss.op)}"],
                    "let the loss be a mean over the examples (tf.reduce_mean), or "
                    "divide the sum by their number, tf.shape(x)[0].",
                )
            )
        if kind in (Kind.UNKNOWN, Kind.RATIO, Kind.MAX, Kind.MIN):
            logging.log_first_n(
                logging.WARNING,
                "The loss %s (%s) is no mean over the examples, nor a sum: it is taken "
                "for a mean, which is weighed by the examples of each replica.",
                1,
                *(loss and loss.name, loss and errors.line_of(loss.op)),
            )
        return kind

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
        self, source: Source, kind: Kind, places: Sequence[Places], n: int
    ) -> tf.Tensor:
        """Returns what a value of replica n is multiplied by before all are added up.

        Args:
            source: What deals the elements it depends on.
            kind: What it is.
            places: What the ops of the program are on each replica.
            n: The replica.
        """
        sums = kind in (Kind.SUM, Kind.COUNT)
        if source is None:
            return self.parts[n] if sums else self.shares[n]
        if sums:
            return tf.constant(1.0)
        counts = self.counts(source, places)
        with tf.device(self._world.devices[n]):
            return counts[n] / tf.add_n(counts)

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
        for op, kind in plan.starts:
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
            weight = self.weight(source, kind, places, n)
            scaled = start * tf.cast(weight, start.dtype)
            for consumer, k in used:
                _tf.set_input(consumer, k, scaled)


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
