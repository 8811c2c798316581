# SPDX-License-Identifier: Apache-2.0
"""What tf.distribute returns during a step, so that other libraries' layers work.

A layer that normalizes over the whole batch, for example, asks
`tf.distribute.get_replica_context()` for its replica and communicates through it. While
a replica is built, that is a context of ours, whose methods are the primitives.
TensorFlow's and other libraries' own code still sees the default strategy, so code that
asks `has_strategy()` (optimizers, metrics, variable creation) behaves as on one device.
Only the user's own code is told the number of replicas.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from replicator import context, errors
from replicator._tf import callers, distribute
from replicator.primitives import all_gather, all_reduce, base, weighing
from replicator.variables import compiled, seen_as_one

# They follow tf.distribute's conventions where it reports several replicas: Keras, for
# one, divides losses by their number, because its optimizers sum (losses/loss.py).
_LIBRARIES = ("tensorflow.", "keras.", "tf_keras.", "sonnet.")
# What asks as soon as it runs; legacy Keras refuses its loops in a function itself.
_KERAS_LOOPS = "keras.src.backend.tensorflow.trainer"
_do_not_convert = tf.autograph.experimental.do_not_convert


def answering(replica: context.ReplicaContext) -> contextlib.AbstractContextManager:
    """Makes tf.distribute treat code in this block as run by `replica`."""
    replica_context = ReplicaContext(replica)
    return distribute.distribution_mode(
        replica=replica_context, strategy=replica_context.answer
    )


def refuse_strategy(call: str) -> None:
    """Raises ContextError under a tf.distribute strategy that has replicas.

    Args:
        call: The call that is refused, for the message.
    """
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return
    raise errors.ContextError(
        f"{call} of a Replicator was called under a {type(strategy).__name__} of "
        "tf.distribute, which would make replicas of its own.",
        fix="leave the strategy's scope() (and its run()): a Replicator takes the "
        "place of a strategy, and its context() that of the scope.",
    )


def _refuse_keras_loop(replica_id: int) -> NoReturn:
    """Raises ContextError, as one of Keras' loops over batches runs inside a step."""
    raise errors.ContextError(
        "a loop of Keras (fit, evaluate, predict, or one of their *_on_batch) was "
        f"called on replica {replica_id} in a step: it is a loop over batches, with "
        "steps of its own.",
        fix="in step_fn, call model.train_step(batch), model.test_step(batch) or the "
        "model itself, or write the step out; or call the loop outside of steps.",
    )


class StepStrategy(tf.distribute.Strategy):
    """The result of `tf.distribute.get_strategy()` in a step, for the user's own code.

    Args:
        num_replicas: The number of replicas.
    """

    def __init__(self, num_replicas: int) -> None:
        super().__init__(distribute.default_strategy().extended)
        self._num_replicas = num_replicas

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._num_replicas


class ReplicaContext(distribute.WatchedContext):
    """The result of `tf.distribute.get_replica_context()` during a step.

    Args:
        replica: The replica being built.
    """

    def __init__(self, replica: context.ReplicaContext) -> None:
        self._own_strategy = StepStrategy(replica.num_replicas)
        super().__init__(distribute.default_strategy(), replica.replica_id)
        self._num_replicas = replica.num_replicas
        self._own_id = replica.replica_id

    def answer(self) -> Any:
        """Returns the result of `tf.distribute.get_strategy()` for whoever asks."""
        module = callers.asker("get_strategy").module
        if not module.startswith(_LIBRARIES):
            return self._own_strategy
        if module == _KERAS_LOOPS:
            _refuse_keras_loop(self._own_id)
        return distribute.default_strategy()

    def before_copy(self) -> None:
        """Raises ContextError: a strategy's variable has copies for its own replicas.

        They are equal where the strategy's own step writes them.
        """
        raise errors.ContextError(
            f"replica {self._own_id} uses a variable that was created under a "
            "tf.distribute strategy, which has copies for replicas of its own.",
            fix="create the model under `with repl.context():`, in place of "
            "`strategy.scope()`.",
        )

    @property
    def strategy(self) -> Any:
        """The strategy, which knows the number of replicas."""
        return self._own_strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        return self._num_replicas

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """The id of the replica being built, a constant int32 scalar."""
        compiled.refuse_to_tell("replica_id_in_sync_group")
        context.require("replica_id_in_sync_group").build.refuse_copies(
            "replica_id_in_sync_group"
        )
        return tf.constant(self._own_id, tf.int32)

    @_do_not_convert
    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduces over all replicas; see `Replicator.all_reduce`.

        Args:
            reduce_op: A tf.distribute.ReduceOp, or its name.
            value: A nest of tensors or IndexedSlices.
            options: Options of collectives that are not used here; ignored.

        Returns:
            A nest like `value`, the same bits on every replica. For a Keras optimizer
            that was not wrapped, `value` itself: it would sum any gradients that it is
            given, including those that are already combined.
        """
        op = _name_of(reduce_op, "all_reduce")
        module = callers.asker("all_reduce").module
        if module.startswith(("keras.", "tf_keras.")) and "optimizer" in module:
            return value
        return all_reduce.all_reduce(value, op)

    @_do_not_convert
    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        """Concatenates the tensors of all replicas.

        Args:
            value: A nest of tensors, alike on all replicas but for the size of `axis`.
            axis: An int, or a tensor whose value is known when the step is built.
            options: Options of collectives that are not used here; ignored.

        Returns:
            A nest like `value`.
        """
        return _gathered(value, axis)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function that is written for all replicas, in each of them.

        Args:
            merge_fn: Called with a `MergedStrategy` and the arguments. tf.distribute
                would call it once, with the values of all replicas; here each replica
                calls it with its own values, and meets the others where it reduces.
            args: Arguments of `merge_fn`.
            kwargs: Keyword arguments of `merge_fn`.

        Returns:
            The result of `merge_fn`.
        """
        merged = context.require("merge_call").reading_merged()
        strategy = MergedStrategy(self)
        with distribute.distribution_mode(cross_replica=strategy), merged:
            return merge_fn(strategy, *args, **(kwargs or {}))


def _name_of(reduce_op: Any, caller: str) -> str:
    """Returns the primitives' name for a tf.distribute.ReduceOp."""
    name = getattr(reduce_op, "value", reduce_op)
    if not isinstance(name, str) or name.lower() not in ("sum", "mean"):
        raise base.bad_argument(
            caller,
            f"was given reduce_op={reduce_op!r}",
            'reduce_op is "SUM" or "MEAN".',
        )
    return name.lower()


class _Facade:
    """Replaces an object of tf.distribute; attributes that it lacks raise an error."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Python and TensorFlow only test whether it exists
            raise AttributeError(name)
        raise errors.UnsupportedError(
            f"a merge_fn asks tf.distribute for {name}, which has no meaning in a step "
            "of Replicator.",
            fix="a merge_fn can reduce, gather and update, in each replica; for "
            "anything else, use the communication of Replicator.",
        )


class MergedStrategy(_Facade):
    """The strategy that is passed to a merge_fn.

    Where tf.distribute would pass a value of all replicas, a value here is that of the
    replica being built.

    Args:
        replica_context: The replica's context.
    """

    def __init__(self, replica_context: ReplicaContext) -> None:
        self.num_replicas_in_sync = replica_context.num_replicas_in_sync
        self.extended = _MergedExtended(replica_context)

    @_do_not_convert
    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduces over all replicas and, if given, over an axis of their values.

        Args:
            reduce_op: A tf.distribute.ReduceOp, or its name.
            value: A nest of tensors, alike on all replicas but for the size of `axis`.
            axis: An int, a tuple of ints, or None.

        Returns:
            A nest like `value`. The mean over an axis is the mean of all elements.
        """
        op = _name_of(reduce_op, "reduce")
        if axis is None:
            return all_reduce.all_reduce(value, op)
        sums = tf.nest.map_structure(lambda x: tf.reduce_sum(x, axis), value)
        if op == "sum":
            return all_reduce.all_reduce(sums, "sum")
        counts = tf.nest.map_structure(lambda x: _count(x, axis), value)
        sums, counts = all_reduce.all_reduce((sums, counts), "sum")
        return tf.nest.map_structure(
            lambda total, count: total / tf.cast(count, total.dtype), sums, counts
        )

    @_do_not_convert
    def gather(self, value: Any, axis: Any) -> Any:
        """Concatenates the tensors of all replicas; see `all_gather`."""
        return _gathered(value, axis)

    @_do_not_convert
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the values of all replicas, in order.

        Args:
            value: A nest of tensors, alike in dtype and shape on all replicas.
        """
        stacked = all_gather.all_gather(value)
        return tuple(
            tf.nest.map_structure(lambda x, r=r: x[r], stacked)
            for r in range(self.num_replicas_in_sync)
        )

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls a function in each replica; `options` are ignored."""
        return self.extended.call_for_each_replica(fn, args, kwargs)


class _MergedExtended(_Facade):
    """The `extended` of a `MergedStrategy`; each value is the built replica's."""

    def __init__(self, replica_context: ReplicaContext) -> None:
        self._replica_context = replica_context

    @_do_not_convert
    def reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """Reduces over all replicas, to all of them, whatever the destinations.

        A mean for a variable is what an assignment of the values would make of them.
        """
        op = _name_of(reduce_op, "reduce_to")
        if op == "mean" and isinstance(destinations, seen_as_one.SeenAsOne):
            return _mean_for_variable(value)
        return all_reduce.all_reduce(value, op)

    @_do_not_convert
    def batch_reduce_to(
        self,
        reduce_op: Any,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Reduces several values over all replicas, to all of them."""
        values = [value for value, _ in value_destination_pairs]
        return all_reduce.all_reduce(values, _name_of(reduce_op, "batch_reduce_to"))

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(var, ...)` in each replica, for the replica's own component.

        Assignments in it are made equal on all replicas, as everywhere in a step.
        """
        with context.require("update").reading_merged(False):
            updated = fn(var, *args, **(kwargs or {}))
        return updated if group else (updated,)

    def colocate_vars_with(
        self, colocate_with_variable: Any
    ) -> contextlib.AbstractContextManager[None]:
        """Changes nothing: a Replicator places the variables created in the block."""
        return contextlib.nullcontext()

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function in each replica, in the context around the merge_call."""
        replica_context = self._replica_context
        replica = context.require("call_for_each_replica")
        mode = distribute.distribution_mode(
            replica=replica_context, strategy=replica_context.answer
        )
        with mode, replica.reading_merged(False):
            return fn(*args, **(kwargs or {}))


def _mean_for_variable(value: Any) -> Any:
    """Returns the mean over all examples; that of a variable is its value."""
    differs = getattr(getattr(value, "placement", None), "differs", False)
    if isinstance(value, seen_as_one.SeenAsOne) and not differs:
        return tf.convert_to_tensor(value)
    replica = context.require("reduce_to")
    weight = None if replica.examples is None else weighing.weight(replica)
    return all_reduce.all_reduce(value, "mean", weight=weight)


def _gathered(value: Any, axis: Any) -> Any:
    """Gathers along an axis, which may be a tensor with a static value."""
    static_axis = tf.get_static_value(axis)
    return all_gather.all_gather(
        value, axis if static_axis is None else int(static_axis)
    )


def _count(value: Any, axis: Any) -> tf.Tensor:
    """Returns the number of elements that a reduction over `axis` combines, int64."""
    sizes = tf.gather(tf.shape(value, tf.int64), axis)
    return tf.reduce_prod(sizes)
