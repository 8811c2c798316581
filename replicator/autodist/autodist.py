# SPDX-License-Identifier: Apache-2.0
"""AutoDist: runs a program written for one device on many."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, overload

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator._tf import variables as tf_variables
from replicator.autodist import arguments, program, variables
from replicator.autodist.function import DistributedFunction
from replicator.autodist.resources import devices_of
from replicator.autodist.session import DistributedSession, SessionCreator, configured
from replicator.autodist.steps import Steps
from replicator.cluster import peers
from replicator.cluster.resources import ResourceSpec
from replicator.graph.ir import functional
from replicator.hosts import cluster
from replicator.options import check
from replicator.replicator import Replicator
from replicator.variables.default_placement import VARIABLES


class AutoDist:
    """Runs a program written for one device on many devices.

    The program builds what it would build on one device; each replica runs a copy of it
    on its part of the examples.

    Source: the interface of AutoDist (Zhang et al. 2020, github.com/petuum/autodist).

    Example:
        >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
        >>> with tf.Graph().as_default(), autodist.scope():
        ...     x = tf.compat.v1.placeholder(tf.float32, [None])
        ...     w = tf.Variable(5.0)
        ...     loss = tf.reduce_mean((w * x - 3.0 * x) ** 2)
        ...     optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        ...     train_op = optimizer.minimize(loss)
        ...     session = autodist.create_distributed_session()
        ...     for _ in range(9):
        ...         value, _ = session.run([loss, train_op], {x: [0.5, 1.0, -1.5]})
        >>> bool(value < 0.1)
        True

    Args:
        resource: The path of a YAML file, a `ResourceSpec`, a list of devices, or None
            for all accelerators, else the CPU. A file that lists one host describes
            this one; if it lists several, call `connect` with it first.
        strategy: How each variable is kept equal; as for `Replicator`.
        local_statistics: As for `Replicator.keras_model`.
        **options: Further options of `Replicator`. By default, build="clone" for
            functions; "trace" for Keras models, whose metrics may be the user's, and
            where each host runs a program of its own.

    Raises:
        DeviceError: A device does not exist.
        ClusterError: The file cannot be read, or lists hosts to which this program is
            not connected.
        ArgumentError: An option has an invalid value, or contradicts the strategy.
    """

    def __init__(
        self,
        resource: str | os.PathLike[str] | ResourceSpec | Sequence[str] | None = None,
        strategy: Any = None,
        *,
        local_statistics: bool = False,
        **options: Any,
    ) -> None:
        check("AutoDist", "local_statistics", local_statistics, (False, True))
        if isinstance(strategy, str) and strategy in VARIABLES:  # the simplest ones
            if options.setdefault("variables", strategy) != strategy:
                raise errors.ArgumentError(
                    f"AutoDist was given strategy={strategy!r} and "
                    f"variables={errors.repr_of(options['variables'])}, which both "
                    "decide where variables are placed.",
                    fix="pass only one of them.",
                )
            strategy = None
        # A program unaware of replicas builds the same on all: one can be cloned. Where
        # each host builds its own, there is nothing to clone.
        default = "clone" if peers.process_group() is None else "trace"
        chosen = {"build": default, **options}
        self._repl = repl = Replicator(
            devices_of(resource), strategy=strategy, **chosen
        )
        self._whole = repl._with(local_statistics=local_statistics)
        # Metrics of Keras that are no sums of examples are updated on one replica.
        build = options.get("build", "trace")
        traced = dataclasses.replace(repl._settings.options, build=build)
        self._keras = repl._with(local_statistics=local_statistics, options=traced)
        self._scope: _Scope | None = None

    @property
    def replicator(self) -> Replicator:
        """The Replicator on whose devices the program runs.

        Example:
            >>> replicator.AutoDist(["CPU:0", "CPU:1"]).replicator.num_replicas
            2
        """
        return self._repl

    @contextlib.contextmanager
    def scope(self) -> Iterator[AutoDist]:
        """Opens a block in which a program for one device is built.

        In a tf.Graph, the block's ops are for `create_distributed_session`. Eagerly, it
        is `Replicator.context`: it creates models and variables for `function` and
        `keras_model`.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     double = tf.compat.v1.placeholder(tf.float32, [None]) * 2
            ...     session = autodist.create_distributed_session()
            ...     session.run(double, {"Placeholder:0": [1.0, 2.0, 3.0]})
            array([2., 4., 6.], dtype=float32)

        Raises:
            ContextError: Called inside another scope.
        """
        if self._scope is not None:
            raise errors.ContextError(
                "AutoDist.scope() was entered inside another scope.",
                fix="enter it once, around the whole program.",
            )
        if tf.executing_eagerly():
            with self._repl.context():
                yield self
            return
        graph = tf.compat.v1.get_default_graph()
        self._scope = _Scope(graph)
        try:
            creator = variables.creator(self._scope.variables)
            with tf_variables.last_variable_creator(creator), functional.control_flow():
                yield self
            self._scope.warn()
        finally:
            self._scope = None

    def create_distributed_session(
        self, config: tf.compat.v1.ConfigProto | None = None, loss: str | None = None
    ) -> DistributedSession:
        """Replicates the graph built in the scope and returns a session that runs it.

        Initializes variables, tables and iterators, except those whose initial values
        are fed.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     x = tf.compat.v1.placeholder(tf.float32, [None, 2])
            ...     mean = tf.reduce_mean(x)
            ...     session = autodist.create_distributed_session()
            >>> float(session.run(mean, {x: [[1, 2], [3, 4], [5, 6]]}))
            3.5

        Args:
            config: A ConfigProto for the session.
            loss: Deprecated, and changes nothing: "mean" or "sum".

        Raises:
            ArgumentError: `loss` is neither.
            ContextError: Called outside a scope in a tf.Graph, or where each host runs
                a program of its own.
            HostLostError: A host of the connection is lost.
            UnsupportedError: The graph holds something that cannot be copied.
        """
        scope = self._scope
        if scope is None or scope.graph is not tf.compat.v1.get_default_graph():
            raise errors.ContextError(
                "create_distributed_session was called outside of a scope.",
                fix="call it in `with tf.Graph().as_default(), autodist.scope():`, "
                "after building what it is to run; in eager mode, use "
                "autodist.function or autodist.keras_model.",
            )
        self._refuse_other_programs()
        arguments.check_loss(loss, "AutoDist.create_distributed_session")
        config = configured(config, self._repl.devices)
        given = cluster.arguments_for(self._repl.devices, config)
        steps = Steps(scope.graph, scope.variables, self._whole, given)
        session = DistributedSession(steps, config)
        scope.initialize(session, steps.initialize())
        scope.has_session = True
        return session

    def _refuse_other_programs(self) -> None:
        """Refuses a session where each host runs a program, with graphs of its own."""
        settings = self._repl._settings
        if settings.peers is None and settings.clock is None:
            return
        mode = "between-graph" if settings.clock is None else "asynchronous"
        flag = "between" if settings.clock is None else "async"
        raise errors.ContextError(
            f"a distributed session was created in {mode} mode, in which hosts share "
            "eager programs only.",
            fix="run the program in-graph: python -m replicator.launch without "
            f"--mode={flag}; or write its steps as functions: @autodist.function.",
        )

    def session_creator(
        self,
        config: tf.compat.v1.ConfigProto | None = None,
        scaffold: tf.compat.v1.train.Scaffold | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
    ) -> tf.compat.v1.train.SessionCreator:
        """Returns what makes a MonitoredSession, and its hooks, run on all replicas.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     x = tf.compat.v1.placeholder(tf.float32, [None])
            ...     mean = tf.reduce_mean(x)
            ...     creator = autodist.session_creator()
            ...     hooks = [tf.compat.v1.train.StopAtStepHook(last_step=9)]
            ...     step = tf.compat.v1.train.get_or_create_global_step()
            ...     with tf.compat.v1.train.MonitoredSession(creator, hooks) as session:
            ...         print(session.run(mean, {x: [1.0, 2.0, 6.0]}))
            3.0

        Args:
            config: A ConfigProto for the session.
            scaffold: As for a ChiefSessionCreator.
            checkpoint_dir: Where the newest checkpoint is restored from, if any.

        Raises:
            ArgumentError: An argument is of another kind.
        """
        return SessionCreator(self, config, scaffold, checkpoint_dir)

    @overload
    def function(
        self,
        function: Callable[..., Any],
        *,
        input_signature: Sequence[Any] | None = None,
        loss: str | None = None,
    ) -> DistributedFunction: ...

    @overload
    def function(
        self,
        function: None = None,
        *,
        input_signature: Sequence[Any] | None = None,
        loss: str | None = None,
    ) -> Callable[[Callable[..., Any]], DistributedFunction]: ...

    def function(
        self,
        function: Callable[..., Any] | None = None,
        *,
        input_signature: Sequence[Any] | None = None,
        loss: str | None = None,
    ) -> DistributedFunction | Callable[[Callable[..., Any]], DistributedFunction]:
        """Returns a function that runs on all replicas, each with a part of the batch.

        It computes what one device computes of the whole batch. Array and tensor
        arguments are split along their first axis; scalars, sparse and ragged tensors
        go to every replica. An op that needs the whole batch gathers it.

        The function is traced once for batches of all sizes, and a second time if other
        sizes vary, as the lengths of sequences do. Variables that it creates at its
        first call are replicated. Python numbers and other values are constants of a
        trace, as in a tf.function.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with autodist.scope():
            ...     w = tf.Variable(1.0)
            >>> @autodist.function
            ... def train_step(x):
            ...     with tf.GradientTape() as tape:
            ...         loss = tf.reduce_mean(w * x)
            ...     w.assign_sub(tape.gradient(loss, w))
            ...     return loss
            >>> float(train_step(np.float32([1, 2, 6]))), float(w)
            (3.0, -2.0)

        Args:
            function: Takes arrays, tensors and any comparable values; with None, a
                decorator is returned.
            input_signature: As for tf.function: tf.TensorSpecs and the like of the
                positional arguments, for which there is one trace.
            loss: Deprecated, and changes nothing: "mean" or "sum".

        Raises:
            ArgumentError: `function` is not callable, `loss` is neither, or
                `input_signature` has no specs.
        """
        arguments.check_loss(loss, "AutoDist.function")
        if function is None:
            return functools.partial(self.function, input_signature=input_signature)
        if not callable(function):
            raise errors.ArgumentError(
                f"AutoDist.function was given {errors.repr_of(function)}.",
                fix="pass a function, or decorate one with @autodist.function.",
            )
        declared = arguments.declared(input_signature)
        return DistributedFunction(function, self._whole, None, declared)

    def keras_model(self, model: Any) -> Any:
        """Makes a Keras 3 model's fit, evaluate and predict run on all replicas.

        See `Replicator.keras_model`.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with autodist.scope():
            ...     model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
            ...     model.compile(optimizer="sgd", loss="mse")
            >>> _ = autodist.keras_model(model)
            >>> history = model.fit(tf.ones([9, 4]), tf.ones([9, 1]), verbose=0).history
            >>> sorted(history)
            ['loss']

        Args:
            model: Created and compiled in the scope.
        """
        return self._keras.keras_model(model)


class _Scope:
    """A single-device program in a tf.Graph.

    Args:
        graph: The graph.

    Attributes:
        variables: The variables created in it, in order.
        has_session: Whether a distributed session was created.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self.graph, self.has_session = graph, False
        self.variables: list[variables.PlainVariable] = []

    def warn(self) -> None:
        """Warns if the program has not asked for a distributed session."""
        if not self.variables or self.has_session:
            return
        text = errors.compose(
            "a scope ends in which variables were created, but no distributed session: "
            "if the program has run, then on one device only.",
            [f"the first variable at {errors.line_of(self.variables[0].op)}"],
            "in place of tf.compat.v1.Session(), call "
            "autodist.create_distributed_session(); in place of "
            "MonitoredTrainingSession(...) or a Supervisor, "
            "MonitoredSession(autodist.session_creator(), hooks).",
        )
        logging.warning("%s", text)

    def initialize(self, session: Any, done: Container[tf.Operation]) -> None:
        """Runs initializers that need no feed: of variables but those done, first."""
        keys = tf.compat.v1.GraphKeys
        first = [v.initializer for v in self.variables if v.op not in done]
        then = self.graph.get_collection(keys.TABLE_INITIALIZERS)
        for ops in (first, [*then, *_started(self.graph)]):
            ready = [op for op in ops if not _is_fed(op)]
            if ready:
                session.run(ready)


def _started(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the ops that start iterators, of iterators with a single dataset."""
    ops_by_iterator: dict[tf.Operation, list[tf.Operation]] = {}
    for op in graph.get_operations():
        if op.type == "MakeIterator":
            ops_by_iterator.setdefault(op.inputs[1].op, []).append(op)
    return [ops[0] for ops in ops_by_iterator.values() if len(ops) == 1]


def _is_fed(op: tf.Operation) -> bool:
    """Whether an op needs a placeholder."""
    return any(one.type == "Placeholder" for one in program.needed([op], []).ops)
