# SPDX-License-Identifier: Apache-2.0
"""Builds what a session runs, in the graph of all replicas.

For each combination of fetches and feeds there is one step, built once: each replica
replays the ops of the user's graph that the fetches need on its part of what is fed
(forms/), and the replicas' results are joined to those of one device.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from replicator import _tf
from replicator.autodist import program
from replicator.autodist.variables import PlainVariable, Variables
from replicator.forms import engine, homes
from replicator.forms.forms import Layout
from replicator.optimizers.totals import Totals

Element: TypeAlias = "tf.Tensor | tf.Operation"
_VARIABLES = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES


@dataclasses.dataclass(frozen=True)
class Step:
    """A step in the graph of all replicas.

    Attributes:
        results: What is fetched of it, as on one device: in place of ops, an op that
            runs all of it.
        rows: What the numbers of rows are fed to, of each batch that is split.
        feeds: What each fed value is fed to: its parts, or all of it.
        initializers: Of variables that the library has made for it.
    """

    results: Sequence[Element]
    rows: Sequence[tf.Tensor]
    feeds: Sequence[Sequence[tf.Tensor]]
    initializers: Sequence[tf.Operation]


class Steps:
    """The steps of a graph for one device, in a graph of all replicas.

    Args:
        source: The user's graph.
        variables: Its variables, of which more may be made.
        repl: The Replicator on whose devices they run.

    Attributes:
        source: The user's graph.
        graph: The graph of all replicas.
    """

    def __init__(
        self,
        source: tf.Graph,
        variables: Sequence[PlainVariable],
        repl: Any,
    ) -> None:
        self.graph = tf.Graph()
        self.source, self._repl, self._plain = source, repl, variables
        self._variables = Variables(repl._settings)
        self._totals = Totals("AutoDist", {})
        self._resources: dict[tf.Operation, tf.Operation] = {}
        self._steps: dict[Any, Step] = {}
        self._lock = threading.RLock()
        self.make_variables()

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return int(self._repl.num_replicas)

    @property
    def trained(self) -> dict[str, Any]:
        """The variables that a strategy decides on, by the user's names."""
        return self._variables.trained

    def variable_of(self, op: tf.Operation) -> PlainVariable | None:
        """Returns the user's variable that an op makes the handle of, or None."""
        return next((v for v in self._plain if v.op is op), None)

    def make_variables(self) -> None:
        """Makes the library's variables for those that the user's graph has now."""
        with self.graph.as_default():
            self._variables.make(self.source, self._plain)

    def get(
        self,
        fetches: Sequence[Element],
        fed: Sequence[tf.Tensor],
        which: engine.Pattern,
        begin: Callable[[Sequence[tf.Operation]], Any],
    ) -> Step:
        """Returns the step of some fetches and feeds.

        Args:
            fetches: What is fetched.
            fed: What is fed.
            which: Which of that is split; see `engine.pattern`.
            begin: Runs initializers of variables that the library makes for it.
        """
        key = tuple(map(_key, fetches)), tuple(map(_key, fed)), which
        step = self._steps.get(key)
        if step is None:
            with self._lock:
                step = self._steps.get(key)
                if step is None:
                    step = self._build(fetches, fed, which)
                    if step.initializers:
                        begin(step.initializers)
                    self._steps[key] = step
        return step

    def _build(
        self,
        fetches: Sequence[Element],
        fed: Sequence[tf.Tensor],
        which: engine.Pattern,
    ) -> Step:
        """Builds a step; the ops that the library itself adds are its own business."""
        targets = [_op(one) for one in fetches]
        needed = program.needed(targets, fed)
        self.make_variables()
        with self.graph.as_default(), tf.device(None), tf.control_dependencies(None):
            resources = [t for op in needed.resources for t in op.outputs]
            given = [self._variables.behind(t) for t in needed.handles]
            given += [t for op in needed.resources for t in self._resource(op).outputs]
            plan, layouts = engine.plan_of(
                *([*fed, *needed.handles, *resources], which, given),
                *([op for op in targets if op in needed.ops],),
                program.reads_first(needed.ops),
            )
            rows, feeds, elements = self._fed(fed, which, layouts)
            found = homes.found(plan, given, [*self.trained.values()])
            made_before = set(map(id, self.graph.get_collection(_VARIABLES)))
            outputs = [one for one in fetches if isinstance(one, tf.Tensor)]
            joined, done = engine.replayed(
                *(self._repl, plan, homes.Sums(found, self._totals)),
                *(list(layouts.values()), elements, given, outputs),
            )
            values = iter(joined)
            results = [
                next(values) if isinstance(one, tf.Tensor) else tf.group(*done)
                for one in fetches
            ]
            made = self.graph.get_collection(_VARIABLES)
            late = [v.initializer for v in made if id(v) not in made_before]
        return Step(results, rows, feeds, late)

    def _resource(self, op: tf.Operation) -> tf.Operation:
        """Returns what creates the same iterator, table or queue for all replicas."""
        if op not in self._resources:
            with tf.device(op.device or "CPU:0"):
                copy = _tf.add_copy(op, [], _tf.attributes_of(op), {})
            self._resources[op] = copy
        return self._resources[op]

    def _fed(
        self,
        fed: Sequence[tf.Tensor],
        which: engine.Pattern,
        layouts: Mapping[int, Layout],
    ) -> tuple[list[tf.Tensor], list[list[tf.Tensor]], list[Any]]:
        """Makes what values are fed to.

        Returns:
            What the numbers of rows are fed to; the parts of each value; and what each
            replica is given of both.
        """
        count = self.num_replicas
        with tf.device("CPU:0"):
            rows = [tf.compat.v1.placeholder(tf.int32, []) for _ in layouts]
            parts = [
                [_placeholder(t) for _ in range(1 if k is None else count)]
                for t, k in zip(fed, which, strict=True)
            ]
        elements = [
            (rows, [part[r % len(part)] for part in parts]) for r in range(count)
        ]
        return rows, parts, elements if fed else []


def _placeholder(tensor: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name=tensor.op.name)


def _op(element: Element) -> tf.Operation:
    return element.op if isinstance(element, tf.Tensor) else element


def _key(element: Element) -> tuple[tf.Operation, int]:
    is_tensor = isinstance(element, tf.Tensor)
    return _op(element), element.value_index if is_tensor else -1
