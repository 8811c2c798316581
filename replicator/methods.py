# SPDX-License-Identifier: Apache-2.0
"""The methods of Replicator that are called inside a step, and only in its own steps.

A primitive takes everything it needs from the context, which knows the replica that
calls it. Only the method knows on which Replicator it was called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import tensorflow as tf

from replicator import arguments, context, errors
from replicator._tf import autograph
from replicator.compressors import all_reduce as compressed
from replicator.interop import tf_replicator
from replicator.primitives import (
    all_gather,
    all_to_all,
    barrier,
    base,
    broadcast,
    gather,
    linked,
    message,
    permute,
    reduce,
    reduce_scatter,
    scatter,
    weighing,
)
from replicator.primitives import groups as grouping
from replicator.step import known, objects
from replicator.variables import compiled

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def primitive(
    function: Callable[_Arguments, _Result],
) -> Callable[Concatenate[Any, _Arguments], _Result]:
    """Returns a primitive as a method of Replicator."""

    @functools.wraps(function)
    def call(self: Any, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[self_parameter, *signature.parameters.values()]
    )
    return in_own_steps(call)


def in_own_steps(method: _Method) -> _Method:
    """Makes a method of Replicator refuse calls in a step of another Replicator."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = context.current()
        # All builds of a Replicator share its ledger.
        if replica is not None and replica.build.ledger is not self._settings.ledger:
            raise _in_other_step(self, method.__name__, replica)
        return method(self, *args, **kwargs)

    return cast(_Method, autograph.not_converted(call))


def _in_other_step(
    replicator: Any, method: str, replica: context.ReplicaContext
) -> errors.ContextError:
    return errors.ContextError(
        f"{method} of the Replicator on {list(replicator.devices)} was called on "
        f"replica {replica.replica_id} in a step of another Replicator, on "
        f"{list(replica.build.world.devices)}.",
        fix=f"call {method} of the Replicator that runs the step.",
    )


class InStep:
    """The methods of Replicator that are called inside a step.

    Primitives have the docstrings of their functions.
    """

    _devices: tuple[tuple[str, ...], ...]  # the devices of each local replica
    _settings: known.Settings

    @property
    def num_replicas(self) -> int:
        """The number of replicas.

        Example:
            >>> repl.num_replicas
            2
        """
        return self._settings.world.num_replicas

    @property
    @in_own_steps
    def replica_id(self) -> int:
        """Inside a step: the id of this replica, 0 <= replica_id < num_replicas.

        It is a Python int, so that plain Python can distinguish replicas.

        Example:
            >>> rates = [0.1, 0.2]
            >>> for x in repl.run(lambda: tf.constant(rates[repl.replica_id])): print(x)
            tf.Tensor(0.1, shape=(), dtype=float32)
            tf.Tensor(0.2, shape=(), dtype=float32)

        Raises:
            ContextError: Read outside a step.
        """
        replica = context.require("replica_id")
        compiled.refuse_to_tell("replica_id")
        replica.build.refuse_copies("replica_id")
        return replica.replica_id

    @property
    @in_own_steps
    def weight(self) -> Any:
        """Inside a step: the weight of this replica in means over the replicas.

        With `input_mode="global_batch"` or `remainder="pad"` this is its share of all
        replicas' examples, a float32 scalar, 0 if it has none. An all_reduce of "mean"
        uses it, so that means over each replica's examples become the mean over all
        examples. It is None where all replicas have the same weight. It is a float32
        whatever dtype the step computes in; code that multiplies by it must cast it:
        tf.cast(repl.weight, x.dtype) * x. Passed as a `weight`, it counts as the exact
        share, so that means of float64 values are not rounded.

        Example:
            >>> batches = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 6.0]).batch(3)
            >>> def step_fn(x):  # [1, 2] and [6]
            ...     return repl.all_reduce(tf.reduce_sum(x) * repl.weight)
            >>> float(repl.run(step_fn, batches, input_mode="global_batch"))
            4.0

        Raises:
            ContextError: Read outside a step.
        """
        return weighing.weight(context.require("weight"))

    @in_own_steps
    def logical_device(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Inside a step: a tf.device context for one of this replica's own devices.

        A tape computes gradients where its `gradient` is called, wherever the forward
        pass was; for a backward pass on that device, call it in such a context, too.

        Example:
            >>> repl = replicator.Replicator([["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]])
            >>> def step_fn():
            ...     with repl.logical_device(1):
            ...         return tf.constant(tf.range(3).device)
            >>> for device in repl.run(step_fn): print(device.numpy().decode())
            /job:localhost/replica:0/task:0/device:CPU:1
            /job:localhost/replica:0/task:0/device:CPU:3

        Args:
            index: The device's position in the replica's entry of `devices`, a Python
                int.

        Raises:
            ArgumentError: The replica has no such device.
            ContextError: Called outside a step.
        """
        replica = context.require("logical_device")
        replica.build.refuse_copies("the replica's own devices")
        names = self._devices[replica.build.world.place(replica.replica_id)]
        if not arguments.is_whole(index, 0, len(names) - 1):
            raise base.bad_argument(
                "logical_device",
                f"was given index {errors.repr_of(index)}, but the replica has "
                f"{len(names)} devices",
                f"0 <= index < {len(names)}.",
            )
        scope: contextlib.AbstractContextManager[Any] = tf.device(names[index])
        return scope

    @in_own_steps
    def group(self, members: Sequence[int]) -> grouping.Group:
        """Returns a group of replicas, for the `group=` of collectives.

        Example:
            >>> repl = replicator.Replicator(["CPU:0", "CPU:1", "CPU:2"])
            >>> ends = repl.group([0, 2])
            >>> def step_fn():
            ...     x = tf.constant(repl.replica_id + 1)
            ...     if repl.replica_id in ends:
            ...         x = repl.all_reduce(x, group=ends)
            ...     return x
            >>> [int(x) for x in repl.run(step_fn)]
            [4, 2, 4]

        Args:
            members: The ids of its replicas, at least one, in any order.

        Raises:
            ArgumentError: A replica does not exist or is listed twice, or none is
                listed.
        """
        return grouping.make_group(members, self.num_replicas)

    @in_own_steps
    def groups(self, members: Sequence[Sequence[int]]) -> grouping.Partition:
        """Returns a partition of all replicas, for the `group=` of collectives.

        Each replica communicates in its own group, which is `.own`.

        Example:
            >>> repl = replicator.Replicator(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
            >>> halves = repl.groups([[0, 1], [2, 3]])
            >>> def step_fn():
            ...     return repl.all_reduce(repl.replica_id, group=halves)
            >>> [int(x) for x in repl.run(step_fn)]
            [1, 1, 5, 5]

        Args:
            members: The ids of the replicas of each group.

        Raises:
            ArgumentError: A replica is in no group, or in two.
        """
        return grouping.make_partition(members, self.num_replicas)

    all_reduce = primitive(compressed.all_reduce)
    broadcast = primitive(broadcast.broadcast)
    all_gather = primitive(all_gather.all_gather)
    reduce = primitive(reduce.reduce)
    gather = primitive(gather.gather)
    scatter = primitive(scatter.scatter)
    reduce_scatter = primitive(reduce_scatter.reduce_scatter)
    all_to_all = primitive(all_to_all.all_to_all)
    # `shift` comes first: the method `permute` hides the module.
    shift = primitive(permute.shift)
    permute = primitive(permute.permute)
    broadcast_object = primitive(objects.broadcast_object)
    all_gather_object = primitive(objects.all_gather_object)
    send = primitive(message.send)
    recv = primitive(message.recv)
    barrier = primitive(barrier.barrier)
    all_sum = primitive(tf_replicator.all_sum)
    all_min = primitive(tf_replicator.all_min)
    all_max = primitive(tf_replicator.all_max)
    map_reduce = primitive(tf_replicator.map_reduce)
    map_gather = primitive(tf_replicator.map_gather)
    linked = primitive(linked.linked)
