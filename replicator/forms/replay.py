# SPDX-License-Identifier: Apache-2.0
"""Builds one replica of the graph for one device, inside of Replicator's build.

Goes through the plans of the graph's ops: converts the inputs of each to the forms that
it takes, once per tensor and form, and adds the op to the sub-graph of the replica that
is being built. What needs a communication comes after all that does not, so that what
can be computed at the same time is one message.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import copying, frames
from replicator.forms import homes, propagate, sizes, updates
from replicator.forms.conversions import Conversions, in_graph
from replicator.forms.forms import REPLICATED, UNSET, Fact, Partial, Sharded
from replicator.forms.propagate import GraphPlan, has_effect
from replicator.forms.rule import OpPlan
from replicator.forms.values import Value
from replicator.inputs import places
from replicator.primitives import base
from replicator.variables import whole_values


class Replica(Conversions):
    """The replica that is being built, and its ops, for those that build them.

    Args:
        repl: The Replicator whose step is built.
        plan: The plan of the graph.
        sums: What the sums of gradients are for.
    """

    def __init__(self, repl: Any, plan: GraphPlan, sums: homes.Sums) -> None:
        super().__init__(repl)
        self._sums, self._plan = sums, plan
        self._program = places.of_program(repl.devices)
        self._values: dict[Any, Value] = {}
        self._done: dict[tf.Operation, list[tf.Operation]] = {}
        self._graph = tf.compat.v1.get_default_graph()
        self._before: list[tf.Operation] = []  # what calls the function that is built
        self.writes = whole_values.Writes()

    def value(self, tensor: tf.Tensor) -> Value:
        """Returns the copies of a tensor of the graph for one device."""
        return self._values[tensor.ref()]

    def give(self, tensor: tf.Tensor, copy: Any) -> None:
        """Says what an input of the graph is: a tensor or one of our variables."""
        self._values[tensor.ref()] = Value(self, self._plan.fact(tensor), copy)
        self._done[tensor.op] = []

    def bring(self, given: Sequence[Any]) -> None:
        """Has the handles of variables in one place made for all replicas at once."""
        build = self._context.build
        if self._context.replica_id == build.traced[0]:
            variables = [x for x in given if updates.is_variable(x)]
            parts = [part for x in variables for part in getattr(x, "parts", [x])]
            owned = [x for x in parts if x.placement.owner is not None]
            alone = [x for x in owned if not x.placement.has_copies]
            build.aliases.make(alone, build.world.local)

    def seen_as(
        self, tensors: Sequence[tf.Tensor], facts: Sequence[Fact]
    ) -> list[Value]:
        """Returns values with the facts that a rule was told of."""
        pairs = zip(map(self.value, tensors), facts, strict=True)
        return [
            Value(self, fact, functools.partial(value.copy, fact.form), value.local)
            if value.fact is not fact
            else value
            for value, fact in pairs
        ]

    # The plans of ops.

    def build(self, todo: Sequence[tf.Operation]) -> None:
        """Builds ops, those that wait for communication after all others."""
        before = self._plan.before
        while todo:
            later: dict[tf.Operation, None] = {}
            awaited: dict[Value, tf.Tensor] = {}
            for op in todo:
                if op not in self._plan.needed:
                    self._leave_out(op)
                    continue
                waits = self._waits(op)
                reads = [t.op for t in self._plan.plans[op].reads]
                waited = [*before(op), *reads] if later else []
                if waits or not later.keys().isdisjoint(waited):
                    later[op] = None
                    awaited.update(waits)
                else:
                    self._build(op)
            self._communicate(awaited)
            todo = list(later)

    def _leave_out(self, op: tf.Operation) -> None:
        def missing() -> Any:
            raise errors.InternalError(
                f"{op.name} is needed, and was not built.",
                [f"at {errors.line_of(op)}"],
                "report this, with the program.",
            )

        self._done[op] = []
        for tensor in op.outputs:
            fact = self._plan.fact(tensor)
            self._values[tensor.ref()] = Value(self, fact, missing)

    def _waits(self, op: tf.Operation) -> dict[Value, tf.Tensor]:
        """Returns what must be communicated before an op can be built.

        An input that is not built yet is no reason to wait with the others.
        """
        plan = self._plan.plans[op]
        if plan.build_local is not None:
            return {}
        return {
            value: self._plan.twins.first(tensor).deref()
            for tensor, need in zip(op.inputs, plan.needs, strict=True)
            if (value := self._values.get(tensor.ref())) and value.waits_for(need)
        }

    def _communicate(self, awaited: dict[Value, tf.Tensor]) -> None:
        """Makes values replicated, by one call for all of the same form."""
        by_form: dict[Any, list[Value]] = {}
        for value in awaited:
            form = value.sent_as
            key = form.axis if isinstance(form, Sharded) else form
            by_form.setdefault(Partial() if key == UNSET else key, []).append(value)
        for key, values in by_form.items():
            form, first = values[0].sent_as, awaited[values[0]]
            with frames.on_behalf_of(first.op):
                own = [value.sent() for value in values]
                if isinstance(form, Sharded):
                    results = self.gathered(own, form)
                elif key == Partial():
                    tensors = [
                        None if value.sent_as == UNSET else awaited[value]
                        for value in values
                    ]
                    results = self._sums.added(tensors, own)
                else:
                    results = self.sums(own, key.how)
            for value, result in zip(values, results, strict=True):
                value.keep(REPLICATED, result)

    def _build(self, op: tf.Operation) -> None:
        plan, inputs = self._plan.plans[op], [self.value(t) for t in op.inputs]
        self._done[op] = []
        with frames.on_behalf_of(op):
            if plan.build_local is not None:
                made: Sequence[Any] = self._in_two_versions(op, plan, inputs)
            else:
                made = self._made(op, plan, inputs)
        for tensor, fact, one in zip(op.outputs, plan.makes, made, strict=True):
            value = one if isinstance(one, Value) else Value(self, fact, one)
            self._values[tensor.ref()] = value

    def _made(
        self, op: tf.Operation, plan: OpPlan, inputs: Sequence[Value], *local: Any
    ) -> Sequence[Any]:
        needs = zip(inputs, plan.needs, strict=True)
        taken = [value.taken(need) for value, need in needs]
        return (
            plan.build(self, op, taken, *local) if plan.build else self.stamp(op, taken)
        )

    def _in_two_versions(
        self, op: tf.Operation, plan: OpPlan, inputs: Sequence[Value]
    ) -> list[Value]:
        """Builds the local versions, and the others when something needs them."""
        assert plan.build_local is not None
        own = [
            value.taken(need) if value.local is None else value.local
            for value, need in zip(inputs, plan.needs, strict=True)
        ]
        local = plan.build_local(self, op, own)
        results: list[Any] = []

        def whole(k: int) -> Any:
            if not results:
                with frames.on_behalf_of(op):
                    more = [local] if plan.build else []
                    results.extend(self._made(op, plan, inputs, *more))
            made = results[k]  # sizes are made one by one
            return made() if callable(made) else made

        return [
            Value(self, fact, functools.partial(whole, k), local[k])
            if sizes.has_local(fact)
            else Value(self, fact, functools.partial(whole, k))
            for k, fact in enumerate(plan.makes)
        ]

    # Ops.

    def stamp(
        self, op: tf.Operation, inputs: Sequence[Any], **changes: Any
    ) -> list[tf.Tensor]:
        """Adds an op to this replica's sub-graph.

        Args:
            op: The op of the graph for one device.
            inputs: Its inputs.
            **changes: Attributes that are changed.

        Returns:
            Its outputs.
        """
        if any(updates.is_variable(x) for x in inputs):
            return updates.update(self, op, inputs)
        if self._context.num_replicas > 1:
            updates.refuse_outside(op, inputs)
        with places.at(self._program if propagate.is_of_program(op) else None):
            return list(self.add(op, inputs, **changes).outputs)

    def add(
        self, op: tf.Operation, inputs: Sequence[Any], **changes: Any
    ) -> tf.Operation:
        """Adds an op that takes none of the library's variables, and returns it."""
        attributes = self._sums.attributes(op)
        new = copying.add_copy(op, inputs, attributes, changes, self._controls(op))
        self._done.setdefault(op, []).append(new)
        return new

    def once(self, op: tf.Operation, inputs: Sequence[Any]) -> list[tf.Tensor]:
        """Adds an op on replica 0, which sends the results to all."""
        is_resource = any(t.dtype in (tf.resource, tf.variant) for t in op.outputs)
        if is_resource or any(updates.is_variable(x) for x in inputs):
            return self.stamp(op, inputs)
        is_here = self._context.replica_id == 0 or not self._context.build.all_traced
        if not self._context.build.all_traced and has_effect(op):
            return self._sent_by_first(op, inputs)
        made = self.stamp(op, inputs) if is_here else []
        if not op.outputs:
            return []
        for x, output in zip(made, op.outputs, strict=is_here):
            x.set_shape(output.shape)  # as the program may have done
        sent = (
            made if is_here else [tf.TensorSpec(t.shape, t.dtype) for t in op.outputs]
        )
        return list(self._repl.broadcast(sent))

    def _sent_by_first(
        self, op: tf.Operation, inputs: Sequence[Any]
    ) -> list[tf.Tensor]:
        """Adds an op that copies of this replica have, too, but do not run."""

        def run() -> list[tf.Tensor]:
            made = self.stamp(op, inputs)
            # TensorFlow lets a branch end before some effects: those of SaveV2, say.
            with tf.control_dependencies(self._done.get(op, [])):
                pairs = [(tf.reshape(x, [-1]), tf.shape(x)) for x in made]
                return [x for pair in pairs for x in pair] or [tf.constant(True)]

        def skip() -> list[tf.Tensor]:
            dtypes = [dtype for t in op.outputs for dtype in (t.dtype, tf.int32)]
            return [tf.zeros([0], dtype) for dtype in dtypes] or [tf.constant(False)]

        with in_graph(self._graph):
            is_first = base.differing(lambda r: r == 0)
        with tf.control_dependencies(self._controls(op)):
            results = tf.cond(is_first, run, skip)
        self.finished(op, results[0].op)
        if not op.outputs:
            return []
        sent = self._repl.all_gather(results, 0)  # the others send nothing
        made = [tf.reshape(x, of) for x, of in zip(sent[::2], sent[1::2], strict=True)]
        for x, output in zip(made, op.outputs, strict=True):
            x.set_shape(output.shape)
        return made

    def _controls(self, op: tf.Operation) -> list[tf.Operation]:
        """Returns what runs before an op; reads and writes are put in order later."""
        if not self._before and not op.control_inputs:
            return []
        before = list(self._before) if has_effect(op) else []
        for one in op.control_inputs:
            before += self._done.get(one, [])
        graph = tf.compat.v1.get_default_graph()
        return [one for one in dict.fromkeys(before) if one.graph is graph]

    # Graphs of functions.

    @contextlib.contextmanager
    def frame(
        self,
        plan: GraphPlan,
        values: Sequence[Value],
        called_by: tf.Operation | None = None,
    ) -> Iterator[Callable[[tf.Tensor], Value]]:
        """Builds a function's graph in the default graph.

        Args:
            plan: The plan of the function's graph.
            values: Its inputs.
            called_by: The op that calls the function, if that is built where it is
                called: what waits for the op then waits for the function's effects.

        Yields:
            A function that returns the values of the graph's tensors.
        """
        self.writes.refresh()  # here, not in the body
        saved = self._plan, self._values, self._done, self._before
        self._before = self._controls(called_by) if called_by is not None else []
        self._plan, self._done = plan, {t.op: [] for t in plan.inputs}
        refs = (t.ref() for t in plan.inputs)
        self._values = dict(zip(refs, values, strict=True))
        try:
            self.build(list(plan.plans))
            self.writes.refresh()
            yield self.value
            effects = self.effects()
        finally:
            self._plan, self._values, self._done, self._before = saved
        if called_by is not None:
            self._done[called_by] = effects

    def effects(self) -> list[tf.Operation]:
        """Returns the ops of the frame that must run, whatever is used of it."""
        graph = tf.compat.v1.get_default_graph()
        built = [
            new for op in self._plan.plans if has_effect(op) for new in self._done[op]
        ]
        return [new for new in built if new.graph is graph]

    def finished(self, op: tf.Operation, new: tf.Operation) -> None:
        """Says which op must have run before what waits for `op`."""
        self._done[op] = [new]

    def flat(self, values: Sequence[Value], facts: Sequence[Fact]) -> list[tf.Tensor]:
        """Returns copies of values, and of their local versions, in one list."""
        result = []
        for value, fact in zip(values, facts, strict=True):
            result.append(value.copy(fact.form))
            if sizes.has_local(fact):
                own = value.local is not None
                result.append(value.local if own else value.copy(fact.form))
        return result

    def unflat(self, flat: Sequence[tf.Tensor], facts: Sequence[Fact]) -> list[Value]:
        """Returns the values of such a list."""
        parts = iter(flat)
        return [
            Value(self, fact, next(parts), next(parts))
            if sizes.has_local(fact)
            else Value(self, fact, next(parts))
            for fact in facts
        ]
