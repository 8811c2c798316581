# SPDX-License-Identifier: Apache-2.0
"""Computes each replica's share of the examples, and so the weights of its gradients.

A loss that is a mean over a replica's examples counts by the replica's share of all
examples, so that the replicas' losses add up to the mean over all. A loss that is a sum
counts fully. The weight multiplies the single number that differentiation starts from,
not each gradient, so values made of gradients on the way equal those of one device,
too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf
from absl import logging

from replicator import _tf, errors
from replicator.autodist import (
    gradient_calls,
    joining,
    kinds,
    losses,
    marked,
    pulled,
    slots,
    stamping,
    wholes,
)
from replicator.autodist.gradient_calls import Gradient
from replicator.autodist.kinds import Value
from replicator.autodist.program import Program
from replicator.autodist.stamping import Places
from replicator.autodist.values import Values
from replicator.autodist.wholes import Whole
from replicator.world import World

_STARTS = re.compile(r"(|.*/)grad_ys_\d+")
Source: TypeAlias = tf.Operation | None  # what deals the elements; None: the feed


@dataclasses.dataclass(frozen=True)
class Write:
    """A write of a value that differs between replicas.

    Attributes:
        op: The op that writes.
        value: The Value of what it writes.
    """

    op: tf.Operation
    value: Value


class Plan:
    """Where the replicas of a program communicate, and with which weights.

    Args:
        program: The single-device graph.
        declared: What the user declares losses to be, "mean" or "sum"; None if nothing.

    Attributes:
        kinds: Infers Values when the examples are split.
        gradients: Groups of gradients that are reduced together.
        starts: The starts of tf.gradients, each with the Value of its loss.
        sources: What deals the elements of the loss of each start.
        writes: Writes of values that differ.
        wholes: The operands that must be of the whole batch for these, by tensor
            reference.
        behind: Markers of gradients from unknown starts whose losses need such
            operands.

    Raises:
        UnsupportedError: No weights make the gradients of a loss those of one device.
    """

    def __init__(self, program: Program, declared: str | None = None) -> None:
        self._program, self._declared = program, declared
        self._known: dict[str, Value] = {}
        self._dealt = {
            op: program.downstream(op) for op in program.copied if pulled.pulls(op)
        }
        self.gradients = gradient_calls.grouped(program.markers)
        self._texts = {marked.text(op, marked.TAKEN): op for op in program.markers}
        self.starts: list[tuple[tf.Operation, Value]] = []
        self.sources: dict[tf.Operation, Source] = {}
        self._begun: dict[str, Value] = {}
        self.kinds = Values(program.flow)
        tape_starts = gradient_calls.begun_by_tapes(program.markers)
        for op in program.copied if program.is_split else ():
            if _STARTS.fullmatch(op.name):
                loss = self._loss(op)
                if loss is not None:
                    self._begin(op, loss, op.name.rpartition("/")[0])
            elif op.name in tape_starts:
                marker = tape_starts[op.name]
                self._begin(op, self._of_tape(marker), op.name)
                targets = (marked.text(marker, marked.LOSS) or "").partition(";")[0]
                found = [
                    self.source(self._tensor(t).op) for t in targets.split(",") if t
                ]
                self.sources[op] = next(filter(None, found), None)
        self.writes = self._find_writes()
        values = [*(v for _, v in self.starts), *(w.value for w in self.writes)]
        self._warn(values)
        self.behind: list[tf.Operation] = []
        for gradient in (g for group in self.gradients for g in group):
            loss, is_begun = self.loss_behind(gradient)
            if not is_begun and loss.wholes:
                self.behind += gradient.ops
                values.append(loss)
        self.wholes = self._put_together(values)

    def _begin(self, start: tf.Operation, loss: Value, key: str) -> None:
        """Records a start of differentiation and its weighted Value."""
        self.starts.append((start, loss))
        self._begun[key] = loss
        value = kinds.of_start(loss, self.kinds.of(start.outputs[0]))
        if value is not None:
            self._program.begin(start, value)
            self.kinds = Values(self._program.flow)

    def _put_together(self, values: Sequence[Value]) -> dict[object, list[Whole]]:
        """Returns the operands that must be of the whole batch for Values to hold."""
        operands = frozenset[Whole]().union(*(value.wholes for value in values))
        by_tensor = wholes.by_tensor(operands)
        if by_tensor is None:
            raise losses.no_whole(next(iter(operands)).tensor)
        return by_tensor

    def _warn(self, values: Sequence[Value]) -> None:
        """Warns of rows that depend on examples other than their own."""
        for op in dict.fromkeys(v.mixed for v in values if v.mixed is not None):
            logging.warning("%s", losses.mixes(op))

    def unweighed(self, tensor: tf.Tensor, value: Value) -> Value:
        """Returns the Value of a tensor of the program before gradients are weighted.

        The copies of starts keep their Values; it is their consumers that get weighted
        ones.
        """
        loss = next(
            (start_loss for op, start_loss in self.starts if op is tensor.op), None
        )
        return value if loss is None else kinds.scaled(value, loss.power - 1)

    def source(self, op: tf.Operation) -> Source:
        """Returns the op that deals the elements which an op depends on."""
        return next(
            (s for s, dependents in self._dealt.items() if op in dependents), None
        )

    def loss_behind(self, gradient: Gradient) -> tuple[Value, bool]:
        """Returns the Value of a gradient's loss, and whether its start is weighted.

        Raises:
            UnsupportedError: The loss is unknown.
        """
        if not self._program.is_split:
            return kinds.SAME, False
        op = gradient.ops[0]
        scope = (marked.text(op, marked.TAKEN) or "").removesuffix("/")
        if scope in self._begun:
            return self._begun[scope], True
        seeds = (marked.text(op, marked.BEGUN) or "").split(",")
        if seeds[0] in self._begun:
            return self._begun[seeds[0]], True
        return self._of_tape(op), False

    def _loss(self, start: tf.Operation) -> Value | None:
        """Returns the Value of the loss that tf.gradients differentiates from a start.

        None if that is unknown and no variable's gradient depends on it; its results
        are then inferred like any other Values.
        """
        scope, _, k = start.name.rpartition("grad_ys_")
        marker = self._texts.get(scope)
        texts = "" if marker is None else marked.text(marker, marked.LOSS) or ""
        names = texts.partition(";")[0].split(",")
        if int(k) < len(names) and names[int(k)]:
            target: tf.Tensor | None = self._tensor(names[int(k)])
        else:  # gradients not by variables
            target = gradient_calls.differentiated(self._program.graph, start)
        if target is None:
            return None
        self.sources[start] = self.source(target.op)
        initial = start.inputs[0] if start.type == "Identity" else None
        try:
            return losses.find(self.kinds, [target], [initial], self._declared)
        except errors.UnsupportedError:
            if marker is not None:
                raise
            return None

    def _of_tape(self, marker: tf.Operation) -> Value:
        """Returns the Value of the loss that a tape differentiated for a gradient."""
        names = marked.text(marker, marked.LOSS)
        if not names:
            line = errors.line_of(marker)
            raise losses.not_found(marked.text(marker, marked.GRADIENT) or "", line)
        if names not in self._known:
            targets, initial = (
                [name and self._tensor(name) for name in part.split(",")]
                for part in names.split(";")
            )
            initial = [one if one != "" else None for one in initial]
            loss = losses.find(self.kinds, targets, initial, self._declared)
            self._known[names] = loss
        return self._known[names]

    def _tensor(self, name: str) -> tf.Tensor:
        tensor: tf.Tensor = self._program.graph.get_tensor_by_name(name)
        return tensor

    def _find_writes(self) -> list[Write]:
        program = self._program
        differing = program.differing()
        initializers = {variable.initializer for variable in program.variables.values()}
        return [
            Write(op, self.kinds.of(op.inputs[1]))
            for op in program.copied
            if op.type in slots.WRITERS
            and op not in initializers
            and op not in program.control
            and op.inputs[1].op in differing
            and program.variable_behind(op.inputs[0]) is not None
        ]


class Shares:
    """How many examples each replica has, as tensors on that replica.

    Args:
        world: The replicas.

    Attributes:
        shares: `shares[n]` is replica n's fraction of what is fed, 1/R where nothing is
            split; fed by the session.
        parts: `parts[n]` is the weight of a sum over replica n's examples: 1 where
            something is split, 0 if the replica got none of it.
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
        self,
        source: Source,
        what: Value,
        places: Sequence[Places],
        n: int,
    ) -> tf.Tensor:
        """Returns the factor of replica n's value in the sum over all replicas.

        Args:
            source: The op that deals the elements the value depends on.
            what: The value: the same on all, a mean, a sum or a ratio.
            places: What the ops of the program are on each replica.
            n: The replica.
        """
        with tf.device(self._world.devices[n]):
            factors = self._counting(source, what.power, places)
            if what.over is None:
                return factors[n]
            divisors = [
                tf.cast(tf.size(stamping.of(replica_places, what.over)), tf.float32)
                for replica_places in places
            ]
            counts = self._counting(source, 1, places)
            total = tf.add_n([a * b for a, b in zip(divisors, counts, strict=True)])
            return joining.part_of(factors[n] * divisors[n], total, factors[n])

    def _put_together(self, plan: Plan, places: Sequence[Places], n: int) -> None:
        """Gives a replica the operands of the whole batch that the plan calls for.

        Args:
            plan: Says which operands these are.
            places: What the ops of the program are on each replica.
            n: The replica.

        Raises:
            UnsupportedError: An operand does not follow from those of the replicas.
        """
        starts = {op for op, _ in plan.starts}
        for operands in plan.wholes.values():
            tensor = operands[0].tensor
            share = self._counting(plan.source(tensor.op), 0, places)[n]
            whole = self.whole(tensor, plan, places, n)
            with tf.device(self._world.devices[n]):
                operand = wholes.scaled(whole, operands[0].power, share)
            uses = [(operand_use.op, operand_use.index) for operand_use in operands]
            uses += wholes.in_gradients(tensor, starts)
            uses += wholes.between(tensor, plan.behind)
            wholes.put(operand, [(places[n][op], k) for op, k in uses])

    def whole(
        self, tensor: tf.Tensor, plan: Plan, places: Sequence[Places], n: int
    ) -> tf.Tensor:
        """Returns a tensor's value over the whole batch, on the device of replica n.

        Raises:
            UnsupportedError: It does not follow from those of the replicas.
        """
        result = self.joined(tensor, plan, places, n)
        if result is None:
            raise losses.no_whole(tensor)
        return result

    def joined(
        self, tensor: tf.Tensor, plan: Plan, places: Sequence[Places], n: int
    ) -> tf.Tensor | None:
        """Returns a tensor's value over the whole batch; None if not computable."""

        def join(one: tf.Tensor, value: Value) -> tf.Tensor:
            shares = self._counting(plan.source(one.op), 0, places)
            parts = [stamping.of(replica_places, one) for replica_places in places]
            value = plan.unweighed(one, value)
            return joining.of_parts(value, parts, shares)

        device = self._world.devices[n]
        with tf.device(device), tf.name_scope("AutoDist"):
            value = plan.kinds.of(tensor)
            if joining.joins(value):
                return join(tensor, value)
            cut = joining.cut(plan.kinds, tensor)
            return cut and joining.again(cut, tensor, join, device)

    def _counting(
        self, source: Source, power: float, places: Sequence[Places]
    ) -> list[tf.Tensor]:
        """Returns the factor of each replica's value in the sum over all."""
        if source is not None:
            counts = self.counts(source, places)
            total = tf.add_n(counts)
            return [joining.share_of(power, count / total) for count in counts]
        if power == 0:
            return self.shares
        if power == 1:
            return self.parts
        # Where nothing is split, all replicas have computed the same value.
        return [
            tf.where(tf.equal(part, 1), joining.share_of(power, share), part)
            for part, share in zip(self.parts, self.shares, strict=True)
        ]

    def counts(self, source: tf.Operation, places: Sequence[Places]) -> list[tf.Tensor]:
        """Returns how many examples each replica has been dealt, as floats."""
        if source not in self._dealt:
            k = pulled.examples_of(source, len(places))
            self._dealt[source] = counts = []
            for replica_places, device in zip(places, self._world.devices, strict=True):
                with tf.device(device), tf.name_scope("AutoDist"):
                    count = tf.constant(1.0)
                    if k is not None:
                        element = replica_places[source].outputs[k]
                        count = tf.cast(tf.shape(element)[0], tf.float32)
                    counts.append(count)
        return self._dealt[source]

    def scale(self, plan: Plan, places: Sequence[Places], n: int) -> None:
        """Weights the starts of tf.gradients on replica n."""
        self._put_together(plan, places, n)
        for op, loss in plan.starts:
            start = places[n][op].outputs[0]
            uses = [
                (consumer, k)
                for consumer in start.consumers()
                for k, tensor in enumerate(consumer.inputs)
                if tensor is start
            ]
            weight = self.weight(plan.sources.get(op), loss, places, n)
            scaled = start * tf.cast(weight, start.dtype)
            for consumer, k in uses:
                _tf.set_input(consumer, k, scaled)
