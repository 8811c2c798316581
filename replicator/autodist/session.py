# SPDX-License-Identifier: Apache-2.0
"""A session on a single-device graph that runs all of its replicas."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from replicator import _tf, errors
from replicator.autodist import feeds, fetches
from replicator.autodist.program import Program
from replicator.autodist.replicas import Replicas
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
        program: Takes the previous Program, returns that of the user's current graph.
        replicas: The graph of all replicas.
        config: A ConfigProto, or None.
        strategy: Returns the strategy in force, given variables by their names.

    Raises:
        ArgumentError: Something is fetched or fed that has no meaning for all replicas.
    """

    def __init__(
        self,
        program: Callable[[Program], Program],
        replicas: Replicas,
        config: Any = None,
        strategy: Callable[[Mapping[str, Any]], Strategy] | None = None,
    ) -> None:
        super().__init__(graph=replicas.program.graph, config=config)
        self._program, self._replicas = program, replicas
        self._strategy = strategy
        self._all = tf.compat.v1.Session(graph=replicas.graph, config=config)
        self._found: tuple[Program, fetches.Fetches] | None = None

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
            ArgumentError: Something is fetched or fed that has no meaning for all
                replicas, or arrays differ in their first dimension.
            RuntimeError: The session was closed.
        """
        lookup = self._look()
        places = self._replicas.places
        listed, flat = _flat(fetches)
        defaults = functools.partial(lookup.defaults, flat)
        fed = feeds.split(self._replicas.program, feed_dict, len(places), defaults)
        leaves = [lookup.leaf(leaf, fed.names) for leaf in flat]
        parts = [part for leaf in leaves for part in leaf.parts]
        sources = list(dict.fromkeys(fetch.source for fetch in parts if fetch.source))
        values, dealt = self._all.run(
            [
                [[part.on(places) for part in leaf.parts] for leaf in leaves],
                [self._replicas.counts(source) for source in sources],
            ],
            self._fed(fed),
            options=options,
            run_metadata=run_metadata,
        )
        counts = {None: fed.counts, **dict(zip(sources, dealt, strict=True))}
        joined = [
            leaf.joined(leaf_values, [counts[part.source] for part in leaf.parts])
            for leaf, leaf_values in zip(leaves, values, strict=True)
        ]
        return _like(fetches, tf.nest.pack_sequence_as(listed, joined))

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
        if self._strategy is None:
            return Strategy()
        with self.graph.as_default():
            return self._strategy(self._replicas.trained())

    def _look(self) -> fetches.Fetches:
        """Returns the lookup of fetches in the user's graph as it is now."""
        self._replicas.extend(self._program)
        program = self._replicas.program
        if self._found is None or self._found[0] is not program:
            replicas = self._replicas
            lookup = fetches.Fetches(program, replicas.plan, replicas.whole)
            self._found = program, lookup
        return self._found[1]

    def _fed(self, fed: feeds.Feeds) -> Mapping[Any, Any]:
        """Returns the feeds of the graph of all replicas, their shares included."""
        values: dict[Any, Any] = feeds.fed_to(fed, self._replicas.places)
        if fed.weights is not None:
            shares = self._replicas.shares
            for n, weight in enumerate(fed.weights):
                values[shares.shares[n]] = weight
                values[shares.parts[n]] = float(weight > 0)
        return values

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
        self._all.close()
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
        return self._all.list_devices()

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
            errors.compose(
                f"a distributed session was given config={errors.shown(config)}.",
                fix="pass a tf.compat.v1.ConfigProto, or None.",
            )
        )
    process, result = _tf.session_config(), tf.compat.v1.ConfigProto()
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
    return _tf.with_less_optimizing(result, cost.share_memory(devices))


def _chooses_gpus(config: tf.compat.v1.ConfigProto) -> bool:
    """Whether a ConfigProto says which GPUs a session has, or how they are split."""
    options = config.gpu_options
    chosen = options.visible_device_list or "GPU" in config.device_count
    return bool(chosen or options.experimental.virtual_devices)


def _listed(fetches: Any) -> Any:
    """Returns a nest of fetches with lists in place of dicts.

    Sessions take keys that cannot be sorted, as tf.nest wants them to be: those of a
    MonitoredSession are its hooks.
    """
    if isinstance(fetches, Mapping):
        return [_listed(fetch) for fetch in fetches.values()]
    if type(fetches) in (list, tuple):
        return type(fetches)(map(_listed, fetches))
    if isinstance(fetches, tuple) and hasattr(fetches, "_fields"):
        return type(fetches)(*map(_listed, fetches))
    return fetches


def _like(fetches: Any, values: Any) -> Any:
    """Returns the values of `_listed` fetches with the dicts that these have."""
    if isinstance(fetches, Mapping):
        pairs = zip(fetches.items(), values, strict=True)
        filled = {key: _like(fetch, value) for (key, fetch), value in pairs}
        result: Any = copy.copy(fetches) if isinstance(fetches, MutableMapping) else {}
        result.update(filled)
        return result
    if type(fetches) in (list, tuple):
        return type(fetches)(map(_like, fetches, values))
    if isinstance(fetches, tuple) and hasattr(fetches, "_fields"):
        return type(fetches)(*map(_like, fetches, values))
    return values


def _flat(fetches: Any) -> tuple[Any, list[Any]]:
    """Returns a nest of fetches without dicts, and its leaves."""
    try:
        listed = _listed(fetches)
        flat: list[Any] = tf.nest.flatten(listed)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.ArgumentError(
            errors.compose(
                f"session.run cannot fetch {errors.shown(fetches)}: "
                f"{errors.told(error)}.",
                fix="fetch tensors, operations, or lists, tuples and dicts of them.",
            )
        ) from error
    return listed, flat


def _no_parts(what: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        errors.compose(
            f"{what} was called on a distributed session: replicas that stop in the "
            "middle of a step would wait for one another.",
            fix="fetch all at once: session.run(fetches, feed_dict).",
        )
    )
