# SPDX-License-Identifier: Apache-2.0
"""The methods of Replicator that build and run steps, implemented in step/."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors, values
from replicator._tf import autograph
from replicator.cluster import faults
from replicator.inputs import positions
from replicator.report import plan as plans
from replicator.step import registry, steps
from replicator.step.requests import Request


class Running:
    """The methods of Replicator that build and run steps."""

    _steps: registry.Steps
    _plan: plans.Plan | None = None
    _input_mode: str

    def _request(
        self, step_fn: Any, inputs: Any, input_mode: str | None, *options: Any
    ) -> Request:
        mode = self._input_mode if input_mode is None else input_mode
        return Request(step_fn, inputs, mode, *options)

    @autograph.not_converted
    def run(
        self,
        step_fn: Callable[..., Any],
        input_fn: Any = None,
        input_mode: str | None = None,
        steps_per_call: int = 1,
        *,
        args: Sequence[Any] = (),
        remainder: str = "drop",
    ) -> Any:
        """Runs one step on all replicas, or builds it where a graph is being built.

        When eager, the step is traced at the first call with these functions, and run
        at every call. Inside a tf.function or a tf.Graph it is built into that graph;
        in a tf.Graph, fetching any output runs the whole step on all replicas.

        Example:
            >>> data = tf.data.Dataset.from_tensor_slices([1.0, 2.0])  # one for each
            >>> for x in repl.run(lambda x, y: x * y, data, args=(2.5,)): print(x)
            tf.Tensor(2.5, shape=(), dtype=float32)
            tf.Tensor(5.0, shape=(), dtype=float32)

        Args:
            step_fn: Called once per device when the step is built; with its replica's
                element if there are inputs, then with `args`. If the element is a tuple
                and step_fn takes more arguments than that, apart from those with a
                default that is not None, it gets the parts of the tuple.
            input_fn: The inputs of the step. A tf.data.Dataset, whose iterator
                continues from call to call with the same object. Or a function, called
                once per device, with an InputContext if it has a parameter, which
                returns a Dataset, a function that returns an element, or an element. A
                Dataset created without an InputContext feeds the replicas in turn:
                replica i gets elements i, i + R, i + 2R, ... Or the element itself, a
                nest of arrays and tensors, which may differ at each call; like `args`
                each replica gets all of it.
            input_mode: "per_replica"; "per_worker": one pipeline, whose elements go to
                the replicas in turn; or "global_batch": one pipeline, each of whose
                elements is split over the replicas along its first axis. Means of
                gradients, and those taken by `all_reduce`, then weight the replicas by
                their examples. None: the `input_mode` of the Replicator.
            steps_per_call: The number of steps to run, each with its own inputs, in a
                loop inside the graph. For small steps that is faster than as many
                calls, and otherwise the same.
            args: Further arguments of step_fn, for every replica: tensors, arrays,
                numbers, and nests of them, which are never split. Each replica gets its
                own value of a PerReplica. They are fed at each call: new values do not
                build the step again, unless their structure, dtypes or shapes differ.
            remainder: What to do with a last round in which not every replica gets an
                element. "drop": omit it. "pad": replicas without an element get a batch
                of no examples, and means weight the replicas as with "global_batch".

        Returns:
            The structure that step_fn returned, with a PerReplica at each leaf; with
            several steps per call, of their stacked values, [steps_per_call, ...].

        Raises:
            tf.errors.OutOfRangeError: The input is exhausted. The step that lacks input
                has changed no variable; earlier steps of the same call are done.
            MismatchError: The replicas communicate or return differently.
            DeadlockError: Replicas would wait for one another in a cycle.
            InputError: The inputs cannot feed a step.
            ArgumentError: step_fn does not accept its arguments, or another argument is
                invalid.
            ContextError: Called inside a step, or under a strategy of tf.distribute.
            HostLostError: A host of the cluster was killed, is silent or cut off.
        """
        with faults.named():
            return self._steps.run(
                self._request(
                    step_fn, input_fn, input_mode, steps_per_call, args, remainder
                )
            )

    @autograph.not_converted
    def build(
        self,
        step_fn: Callable[..., Any],
        input_fn: Any = None,
        input_mode: str | None = None,
        steps_per_call: int = 1,
        *,
        args: Sequence[Any] = (),
        remainder: str = "drop",
    ) -> steps.Step:
        """Returns the callable that `run` calls; the same one for the same functions.

        Example:
            >>> step = repl.build(lambda: repl.all_reduce(1.0))
            >>> for x in step(): print(x)
            tf.Tensor(2.0, shape=(), dtype=float32)
            tf.Tensor(2.0, shape=(), dtype=float32)

        Args:
            step_fn: As for `run`.
            input_fn: As for `run`.
            input_mode: As for `run`.
            steps_per_call: As for `run`.
            args: As for `run`; a call of the step may pass others.
            remainder: As for `run`.

        Returns:
            A `Step`: call it to run one step, without arguments or with other `args`.
            Its `initialize()` restarts the inputs.

        Raises:
            InputError: The inputs cannot feed a step, or `input_mode` is unknown.
            ArgumentError: step_fn does not accept its arguments, or another argument is
                invalid.
        """
        return self._steps.get(
            self._request(
                step_fn, input_fn, input_mode, steps_per_call, args, remainder
            )
        )

    @autograph.not_converted
    def epoch(
        self,
        step_fn: Callable[..., Any],
        dataset: Any,
        input_mode: str | None = None,
        *,
        args: Sequence[Any] = (),
        remainder: str = "drop",
    ) -> Iterable[Any]:
        """Returns the results of a step, for one pass over a dataset.

        Each pass begins at the first element, and the step is built in the first one
        only, if `step_fn` and `dataset` are the same objects.

        Example:
            >>> data = tf.data.Dataset.range(6).batch(4)  # batches of 4 and of 2
            >>> step_fn = lambda x: repl.all_reduce(tf.reduce_sum(x))
            >>> sums = repl.epoch(step_fn, data, "global_batch")
            >>> len(sums), [int(x) for x in sums]
            (2, [6, 9])

        Args:
            step_fn: As for `run`.
            dataset: A tf.data.Dataset that ends, or a function that returns one, as for
                `run`.
            input_mode: As for `run`.
            args: As for `run`.
            remainder: As for `run`.

        Returns:
            An iterable of what `run` returns, for each step. It has a len() if the
            dataset has one, which progress bars such as tqdm show.

        Raises:
            InputError: The dataset never ends; or two passes over it are mixed.
            ContextError: Called in a graph or inside a step.
        """
        if context.current() is not None or not tf.executing_eagerly():
            raise errors.ContextError(
                "epoch was called inside a step or a graph, where how many steps it "
                "takes cannot be known.",
                fix="call it eagerly; or build one step, repl.run(step_fn, dataset), "
                "and run it until tf.errors.OutOfRangeError.",
            )
        return self._steps.epoch(
            self._request(step_fn, dataset, input_mode, 1, args, remainder)
        )

    @staticmethod
    def select(results: Any, replica: int) -> Any:
        """Returns what one replica returned: a result of `run` without PerReplica.

        Example:
            >>> results = repl.run(lambda: {"id": repl.replica_id, "one": 1.0})
            >>> {name: float(x) for name, x in repl.select(results, 1).items()}
            {'id': 1.0, 'one': 1.0}

        Args:
            results: A nest of tuples, lists and dicts with PerReplica in it.
            replica: The position of the replica's value, a Python int.

        Raises:
            ArgumentError: There is no such replica.
        """
        return values.select(results, replica)

    @property
    def plan(self) -> plans.Plan:
        """The communication plan of the step that was built last, a `Plan`.

        `repl.build(step_fn, input_fn).plan` is the plan of a particular step, which
        need not have run.

        Example:
            >>> _ = repl.run(lambda: repl.all_reduce(tf.zeros([10]), "mean"))
            >>> [(row.primitive, row.reduction, row.times) for row in repl.plan]
            [('all_reduce', 'mean', 1)]

        Raises:
            ContextError: No step has been built yet.
        """
        if self._plan is None:
            raise errors.ContextError(
                "the plan was asked for before any step was built.",
                fix="run a step first, or ask for repl.build(step_fn, input_fn).plan, "
                "which builds a step without running it.",
            )
        return self._plan

    def _keep_plan(self, plan: plans.Plan) -> None:
        """Keeps the plan of a step that has just been built."""
        self._plan = plan

    @autograph.not_converted
    def initialize(self, session: tf.compat.v1.Session | None = None) -> None:
        """Restarts the inputs of all steps from their first elements.

        Example:
            >>> step = repl.build(lambda x: x, lambda: tf.data.Dataset.range(4))
            >>> [int(x) for x in step()], [int(x) for x in step()]
            ([0, 1], [2, 3])
            >>> repl.initialize()
            >>> [int(x) for x in step()]
            [0, 1]

        Args:
            session: A plain Session, which needs this once before the first step; a
                MonitoredSession does it by itself. None when eager.

        Raises:
            ArgumentError: `session` is not a session.
        """
        self._steps.initialize(session)

    @property
    def inputs(self) -> positions.Positions:
        """The positions of the steps' inputs, for checkpoints of eager programs.

        Elements that a step has read are not read again after a restart. Datasets are
        identified by the order in which steps first use them. A Dataset that calls
        Python, or is prefetched to an accelerator, has no position that could be saved.

        Example:
            >>> step = repl.build(lambda x: x, tf.data.Dataset.range(8))
            >>> checkpoint = tf.train.Checkpoint(inputs=repl.inputs)
            >>> _ = step()  # reads 0 and 1
            >>> path = checkpoint.save("position")
            >>> [int(x) for x in step()]
            [2, 3]
            >>> _ = checkpoint.restore(path)
            >>> [int(x) for x in step()]
            [2, 3]
        """
        return self._steps.inputs
