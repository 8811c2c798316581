# SPDX-License-Identifier: Apache-2.0
"""A session on a single-device graph that runs all of its replicas.

And what makes the sessions of TensorFlow 1's MonitoredSession such ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from replicator import errors
from replicator._tf import choice, graphs
from replicator.autodist import elements
from replicator.autodist.steps import Steps
from replicator.costs import cost
from replicator.strategy.description import Strategy


class DistributedSession(tf.compat.v1.Session):
    """A session of the user's graph that runs the graph of all replicas.

    `AutoDist.create_distributed_session` returns it. Fetches and feeds are tensors and
    ops of the user's graph, or their names.

    Example:
        >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
        >>> with tf.Graph().as_default(), autodist.scope():
        ...     x = tf.compat.v1.placeholder(tf.float32, [None])
        ...     w = tf.Variable(1.0)
        ...     loss = tf.reduce_mean(w * x)
        ...     train = tf.compat.v1.train.GradientDescentOptimizer(0.5).minimize(loss)
        ...     session = autodist.create_distributed_session()
        >>> with session:
        ...     value, _ = session.run([loss, train], {x: [1.0, 2.0, 6.0]})
        ...     print(value, session.run(w))
        3.0 -0.5

    Args:
        steps: Builds what is run, in the graph of all replicas.
        config: A ConfigProto.
    """

    def __init__(self, steps: Steps, config: Any) -> None:
        super().__init__(graph=steps.source, config=config)
        self._steps = steps

    def run(
        self,
        fetches: Any,
        feed_dict: Any = None,
        options: tf.compat.v1.RunOptions | None = None,
        run_metadata: tf.compat.v1.RunMetadata | None = None,
    ) -> Any:
        """Runs the fetches on all replicas; returns their values for all examples.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     x = tf.compat.v1.placeholder(tf.float32, [None, 2], name="x")
            ...     fetches = {"rows": tf.reduce_sum(x, 1), "mean": tf.reduce_mean(x)}
            ...     session = autodist.create_distributed_session()
            >>> values = session.run(fetches, {"x:0": [[1, 2], [3, 4], [5, 6]]})
            >>> print(values["rows"], values["mean"])  # of all three examples
            [ 3.  7. 11.] 3.5

        Args:
            fetches: A nest of tensors, operations, variables and their names.
            feed_dict: Values of the whole batch by tensors or their names; arrays of
                shape [examples, ...], which are split along their first axis, and
                scalars.
            options: As for any session.
            run_metadata: As for any session; covers all replicas.

        Returns:
            The nest, with NumPy arrays at the leaves; None for operations. What has a
            row for each example is of shape [examples, ...], in the order of the batch.

        Raises:
            ArgumentError: Something is fetched or fed that is not in the graph, or a
                value does not fit; or a placeholder is needed and not fed.
            UnsupportedError: An op that is needed cannot run on replicas.
            RuntimeError: The session was closed.
        """
        if self._closed:
            raise RuntimeError("Attempted to use a closed Session.")
        graph, steps = self.graph, self._steps
        leaves = elements.leaves(fetches)
        parts = [elements.fetched(leaf, graph, steps.variable_of) for leaf in leaves]
        targets = [one for part in parts for one in part]
        values = iter(())
        if targets:
            fed = elements.fed(graph, feed_dict)
            which = elements.pattern(fed, steps.num_replicas)
            arrays = [array for _, array in fed]
            step = steps.get(targets, fed, which)
            values = iter(step.run(arrays, options, run_metadata))
        pairs = zip(leaves, parts, strict=True)
        joined = [elements.value(leaf, [next(values) for _ in n]) for leaf, n in pairs]
        remaining = iter(joined)
        return elements.mapped(fetches, lambda _: next(remaining))

    @property
    def strategy(self) -> Strategy:
        """The strategy in force: how each trained variable is kept equal.

        Example:
            >>> from replicator import strategy
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"],
            ...                                strategy.PartitionedPS())
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     w = tf.Variable(tf.zeros([4, 2]), name="w")
            ...     session = autodist.create_distributed_session()
            >>> session.strategy.node("w").partitioner
            '2,1'
        """
        return self._steps.strategy

    def close(self) -> None:
        """Closes the session.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     w = tf.Variable(1.0)
            ...     session = autodist.create_distributed_session()
            >>> session.close()
            >>> session.run(w)
            Traceback (most recent call last):
            ...
            RuntimeError: Attempted to use a closed Session.
        """
        self._steps.close()
        super().close()

    def list_devices(self) -> Any:
        """Returns the devices that the session can use, those of all replicas included.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     session = autodist.create_distributed_session()
            >>> devices = session.list_devices()
            >>> devices[1].name
            '/job:localhost/replica:0/task:0/device:CPU:1'

        Returns:
            A list with a `name`, a `device_type` and a `memory_limit_bytes` for each.
        """
        return self._steps.session.list_devices()

    def make_callable(
        self,
        fetches: Any,
        feed_list: Sequence[Any] | None = None,
        accept_options: bool = False,
    ) -> Callable[..., Any]:
        """Returns a function that runs `fetches`, fed with its arguments.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     x = tf.compat.v1.placeholder(tf.float32, [None])
            ...     mean = tf.reduce_mean(x)
            ...     session = autodist.create_distributed_session()
            >>> run = session.make_callable(mean, [x])
            >>> print(run([1.0, 2.0, 6.0]))
            3.0

        Args:
            fetches: As for `run`.
            feed_list: The tensors, or their names, that the arguments are values of.
            accept_options: Whether the function takes `options` and `run_metadata`, as
                `run` does.

        Raises:
            ValueError: The function is called with another number of values.
        """
        keys = list(feed_list or ())

        def call(*values: Any, **options: Any) -> Any:
            fed = dict(zip(keys, values, strict=True))
            return self.run(fetches, fed, **(options if accept_options else {}))

        return call

    def partial_run_setup(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses to run a step in parts.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     mean = tf.reduce_mean(tf.ones([4]))
            ...     session = autodist.create_distributed_session()
            ...     try:
            ...         session.partial_run_setup([mean])
            ...     except replicator.UnsupportedError:
            ...         print(session.run(mean))
            1.0

        Args:
            *args: Are ignored.
            **kwargs: Are ignored.

        Raises:
            UnsupportedError: Always.
        """
        raise _no_parts("partial_run_setup")

    def partial_run(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses to run a step in parts.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     mean = tf.reduce_mean(tf.ones([4]))
            ...     session = autodist.create_distributed_session()
            ...     try:
            ...         session.partial_run("handle", mean)
            ...     except replicator.UnsupportedError:
            ...         print(session.run(mean))
            1.0

        Args:
            *args: Are ignored.
            **kwargs: Are ignored.

        Raises:
            UnsupportedError: Always.
        """
        raise _no_parts("partial_run")


class SessionCreator(tf.compat.v1.train.SessionCreator):
    """Creates distributed sessions for a MonitoredSession.

    `AutoDist.session_creator` returns it.

    Args:
        autodist: The AutoDist in whose scope the graph is built.
        config: A ConfigProto for the session, or None.
        scaffold: What else is initialized and saved, as for a ChiefSessionCreator.
        checkpoint_dir: Where the newest checkpoint is restored from, if there is one.

    Raises:
        ArgumentError: An argument is of another kind.
    """

    def __init__(
        self,
        autodist: Any,
        config: Any = None,
        scaffold: tf.compat.v1.train.Scaffold | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(scaffold, tf.compat.v1.train.Scaffold | None):
            _refuse_argument("scaffold", scaffold, "a tf.compat.v1.train.Scaffold")
        if not isinstance(checkpoint_dir, str | os.PathLike | None):
            _refuse_argument(
                "checkpoint_dir", checkpoint_dir, "the path of a directory"
            )
        self._autodist, self._config = autodist, config
        self._scaffold = tf.compat.v1.train.Scaffold() if scaffold is None else scaffold
        self._directory = None if checkpoint_dir is None else os.fspath(checkpoint_dir)

    def create_session(self) -> Any:
        """Returns a distributed session whose variables have values.

        Example:
            >>> autodist = replicator.AutoDist(["CPU:0", "CPU:1"])
            >>> with tf.Graph().as_default(), autodist.scope():
            ...     w = tf.Variable(3.0)
            ...     session = autodist.session_creator().create_session()
            >>> float(session.run(w))
            3.0
        """
        scaffold = self._scaffold
        scaffold.finalize()
        session = self._autodist.create_distributed_session(self._config)
        newest = self._directory and tf.train.latest_checkpoint(self._directory)
        if newest:
            scaffold.saver.restore(session, newest)
        else:
            session.run(scaffold.init_op, scaffold.init_feed_dict)
            if scaffold.init_fn is not None:
                scaffold.init_fn(session)
        session.run(scaffold.local_init_op)
        return session


def _refuse_argument(name: str, value: Any, wanted: str) -> NoReturn:
    raise errors.ArgumentError(
        f"session_creator was given {name}={errors.repr_of(value)}.",
        fix=f"pass {wanted}, or nothing.",
    )


def configured(config: Any, devices: Sequence[str]) -> Any:
    """Returns a ConfigProto with which a session has all the devices of the replicas.

    It switches off graph optimizations that find nothing in graphs of many replicas.

    Args:
        config: The user's; with None, a session has the logical devices of the program,
            and puts what has no kernel for a GPU on its host, as it does in the user's
            graph, whose ops ask for no device.
        devices: The device of each replica.

    Raises:
        ArgumentError: `config` is not a ConfigProto.
    """
    if config is not None and not isinstance(config, tf.compat.v1.ConfigProto):
        raise errors.ArgumentError(
            f"a distributed session was given config={errors.repr_of(config)}.",
            fix="pass a tf.compat.v1.ConfigProto, or None.",
        )
    process, result = graphs.session_config(), tf.compat.v1.ConfigProto()
    result.CopyFrom(process if config is None else config)
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    cpus = [spec.device_index or 0 for spec in specs if spec.device_type == "CPU"]
    if cpus:
        result.device_count["CPU"] = max(result.device_count["CPU"], max(cpus) + 1)
    if not _chooses_gpus(result):  # the process may split them
        process.gpu_options.MergeFrom(result.gpu_options)
        result.gpu_options.CopyFrom(process.gpu_options)
    if config is None:
        result.allow_soft_placement = True
    # Many ops never run: copies of variables' initializers, and each replica's copy of
    # writes to variables that another one owns. TensorFlow need not place them.
    result.graph_options.place_pruned_graph = True
    return choice.with_less_optimizing(result, cost.share_memory(devices))


def _chooses_gpus(config: tf.compat.v1.ConfigProto) -> bool:
    """Whether a ConfigProto says which GPUs a session has, or how they are split."""
    options = config.gpu_options
    chosen = options.visible_device_list or "GPU" in config.device_count
    return bool(chosen or options.experimental.virtual_devices)


def _no_parts(what: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f"{what} was called on a distributed session: replicas that stop in the middle "
        "of a step would wait for one another.",
        fix="fetch all at once: session.run(fetches, feed_dict).",
    )
