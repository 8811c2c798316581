# SPDX-License-Identifier: Apache-2.0
"""Builds what a session runs, in the graph of all replicas.

For each combination of fetches and feeds there is one step, built once: each replica
replays the ops of the user's graph that the fetches need on its part of what is fed
(forms/), and the replicas' results are joined to those of one device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from replicator._tf import copying, functions, sessions
from replicator.autodist import program
from replicator.autodist.variables import PlainVariable, Variables
from replicator.cluster import faults
from replicator.forms import assembly, told
from replicator.graph.ir import functional
from replicator.inputs import places
from replicator.optimizers.totals import Totals
from replicator.strategy import choosing
from replicator.strategy.description import Strategy

Element: TypeAlias = "tf.Tensor | tf.Operation"
_VARIABLES = tf.compat.v1.GraphKeys.GLOBAL_VARIABLES


class Step:
    """A step in the graph of all replicas.

    Args:
        session: A session of the graph.
        lock: Held while the graph is built.
        fetches: What is fetched of the step, as on one device: in place of ops, one
            that runs all of it.
        feeds: What is fed.
    """

    def __init__(
        self,
        session: tf.compat.v1.Session,
        lock: threading.RLock,
        fetches: Sequence[Element],
        feeds: Sequence[tf.Tensor],
    ) -> None:
        self._session, self._lock, self._fetches = session, lock, fetches
        self._feeds = feeds
        self._run = self._prepared()

    def _prepared(self, options: Any = None) -> Callable[..., list[Any]]:
        """Returns what runs it: others build while it runs, but not while it begins."""
        tensors = [one for one in self._fetches if isinstance(one, tf.Tensor)]
        ops = [one for one in self._fetches if isinstance(one, tf.Operation)]
        with self._lock:
            return sessions.session_callable(
                self._session, tensors, ops, self._feeds, options
            )

    def run(
        self, values: Sequence[Any], options: Any = None, metadata: Any = None
    ) -> list[Any]:
        """Runs it; returns what is fetched, and None in place of ops.

        Args:
            values: What it is fed.
            options: RunOptions, or None.
            metadata: RunMetadata, or None.
        """
        try:
            run = self._run if options is None else self._prepared(options)
            found = iter(run(*values, run_metadata=metadata))
        except tf.errors.OpError as error:
            host_error = faults.lost(error)
            if host_error is not None:
                raise host_error from error
            told.note_lines(error, self._session.graph)
            raise
        return [
            next(found) if isinstance(one, tf.Tensor) else None for one in self._fetches
        ]


class Steps:
    """The steps of a graph for one device, in a graph of all replicas.

    Args:
        source: The user's graph.
        variables: Its variables, of which more may be made.
        repl: The Replicator on whose devices they run.
        arguments: The arguments of the session.

    Attributes:
        source: The user's graph.
        graph: The graph of all replicas.
        session: A session of that.
    """

    def __init__(
        self,
        source: tf.Graph,
        variables: Sequence[PlainVariable],
        repl: Any,
        arguments: Mapping[str, Any],
    ) -> None:
        self.graph = tf.Graph()
        self.session = tf.compat.v1.Session(graph=self.graph, **arguments)
        self.source, self._repl, self._plain = source, repl, variables
        self._variables = Variables(repl._settings)
        self._totals = Totals("AutoDist", {})
        self._resources: dict[tf.Operation, tf.Operation] = {}
        self._steps: dict[Any, Step] = {}
        self._lock, self._warned = threading.RLock(), False
        self.make_variables()

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return int(self._repl.num_replicas)

    @property
    def trained(self) -> dict[str, Any]:
        """The variables that a strategy decides on, by the user's names."""
        return self._variables.trained

    @property
    def strategy(self) -> Strategy:
        """The strategy in force."""
        with self.graph.as_default():
            chooser = self._repl._settings.chooser
            return choosing.in_force(self.trained, self._repl._resources, chooser)

    def variable_of(self, op: tf.Operation) -> PlainVariable | None:
        """Returns the user's variable that an op makes the handle of, or None."""
        return next((v for v in self._plain if v.op is op), None)

    def make_variables(self) -> None:
        """Makes the library's variables for those that the user's graph has now."""
        with self.graph.as_default():
            self._variables.make(self.source, self._plain)

    def initialize(self) -> set[tf.Operation]:
        """Initializes variables; returns the handles' ops of those that it can."""
        made, copied = self._variables.made, self._variables.initial
        if copied:
            with self._lock:
                self.session.run([made[op].initializer for op in copied])
        return {*copied}

    def get(
        self,
        fetches: Sequence[Element],
        fed: Sequence[tuple[tf.Tensor, Any]],
        which: assembly.Pattern,
    ) -> Step:
        """Returns the step of some fetches and feeds.

        Args:
            fetches: What is fetched.
            fed: Pairs of what is fed, and the values.
            which: Which of that is split; see `assembly.pattern`.
        """
        key = tuple(map(_key, fetches)), tuple(_key(t) for t, _ in fed), which
        if key not in self._steps:
            with self._lock, faults.named():
                if key not in self._steps:
                    self._steps[key] = self._build(fetches, fed, which)
        return self._steps[key]

    def close(self) -> None:
        """Closes the session; TensorFlow would wait for hosts that are lost."""
        if self._program() is not None and faults.of_hosts():
            sessions.leave_session(self.session)
        else:
            self.session.close()

    def _build(
        self,
        fetches: Sequence[Element],
        fed: Sequence[tuple[tf.Tensor, Any]],
        which: assembly.Pattern,
    ) -> Step:
        with (
            functional.control_flow(),
            self.graph.as_default(),
            tf.device(None),
            tf.control_dependencies(None),
        ):
            built = self._planned(fetches, fed, which)
            home = self._program() or "CPU:0"
            with tf.device(home):
                feeds = [_placeholder(tensor) for tensor, _ in fed]
            made_before = set(map(id, self.graph.get_collection(_VARIABLES)))
            outputs = [one for one in fetches if isinstance(one, tf.Tensor)]
            joined, done = built.replayed(
                feeds, outputs, self.trained.values(), self._totals, home
            )
            values = iter(joined)
            results = [
                next(values) if isinstance(one, tf.Tensor) else tf.group(*done)
                for one in fetches
            ]
            made = self.graph.get_collection(_VARIABLES)
            late = [v.initializer for v in made if id(v) not in made_before]
        if late:
            self.session.run(late)
        return Step(self.session, self._lock, results, feeds)

    def _planned(
        self,
        fetches: Sequence[Element],
        fed: Sequence[tuple[tf.Tensor, Any]],
        which: assembly.Pattern,
    ) -> assembly.Program:
        """Plans what a run needs of the user's graph."""
        tensors = [tensor for tensor, _ in fed]
        needed = program.needed(map(_op, fetches), tensors)
        program.check_fed(needed.ops)
        self.make_variables()
        resources = [t for op in needed.resources for t in op.outputs]
        given = [self._variables.behind(t) for t in needed.handles]
        given += [t for op in needed.resources for t in self._resource(op).outputs]
        rows = tuple(
            None if k is None else len(x) for (_, x), k in zip(fed, which, strict=True)
        )
        planned = assembly.planned(
            self._repl,
            [*tensors, *needed.handles, *resources],
            which,
            rows,
            given,
            [one for one in fetches if _op(one) in needed.ops],
            program.reads_first(needed.ops),
        )
        self._warned = self._warned or told.warn_of_gathers(planned.plan, rows)
        return planned

    def _program(self) -> str | None:
        return places.of_program(self._repl.devices)

    def _resource(self, op: tf.Operation) -> tf.Operation:
        """Returns what creates the same iterator, table or queue for all replicas."""
        if op not in self._resources:
            functions.copy_functions(self.source, self.graph)  # that its functions call
            with tf.device(self._program() or op.device or "CPU:0"):
                copy = copying.add_copy(op, [], copying.attributes_of(op), {})
            self._resources[op] = copy
        return self._resources[op]


def _placeholder(tensor: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder(tensor.dtype, tensor.shape, name=tensor.op.name)


def _op(element: Element) -> tf.Operation:
    return element.op if isinstance(element, tf.Tensor) else element


def _key(element: Element) -> tuple[tf.Operation, int]:
    is_tensor = isinstance(element, tf.Tensor)
    return _op(element), element.value_index if is_tensor else -1
