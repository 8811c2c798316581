"""How data reaches the replicas: pipelines, prefetching.

An input_fn is called once per device (or once in all, where its dataset is dealt). What
it returned becomes a Feed: something that gives each replica its element in the graph
of a step. Replicas pull one after the other, before anything else of the step happens,
so that an exhausted input ends the step on every replica or on none.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.inputs import checks
from replicator.inputs.input_context import InputContext
from replicator.primitives import base

_CONTEXT_NAMES = ("ctx", "context", "input_context")  # asked for, even with a default
_PREFETCH = 2  # steps that wait ready in memory, as in tf.distribute's own inputs


class Feed(abc.ABC):
    """What gives the replicas of a step their elements."""

    @abc.abstractmethod
    def pull(self) -> list[Any]:
        """Adds the ops to the default graph; returns one element per replica."""

    def ready(self, elements: Sequence[Any]) -> list[tf.Operation]:
        """Returns the ops after which every replica has its element, which may fail."""
        return list(
            dict.fromkeys(op for element in elements for op in _ops_of(element))
        )

    @abc.abstractmethod
    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Starts from the first element again, if the feed has a state."""


class ValuesFeed(Feed):
    """Elements that are functions, called in each build, or tensors."""

    def __init__(self, sources: Sequence[Any], devices: Sequence[str]) -> None:
        self._sources, self._devices = tuple(sources), tuple(devices)

    def pull(self) -> list[Any]:
        """Calls the functions, on their devices, and copies the tensors to theirs."""
        elements: list[Any] = []
        before: list[tf.Operation] = []
        for source, device in zip(self._sources, self._devices, strict=True):
            with tf.device(device), tf.control_dependencies(before):
                if checks.source_kind(source) == "a function":
                    element = source()
                    checks.check_element(element, "the function", source)
                else:
                    element = source
                elements.append(_identities(element, source))
            before = [] if _is_there(source) else _ops_of(elements[-1])
        checks.check_alike([checks.specs(element) for element in elements])
        return elements

    def ready(self, elements: Sequence[Any]) -> list[tf.Operation]:
        """Returns the ops of what may fail; other tensors are there in any case."""
        pairs = zip(self._sources, elements, strict=True)
        return super().ready([e for source, e in pairs if not _is_there(source)])

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Does nothing: functions are called anew in each step anyway."""


class DatasetFeed(Feed):
    """Elements of datasets: one per replica, or one that is dealt to all.

    The iterators live as long as the feed, between calls of the step.
    """

    def __init__(
        self, datasets: Sequence[tf.data.Dataset], devices: Sequence[str]
    ) -> None:
        self._devices = tuple(devices)
        self._dealt = len(datasets) == 1 and len(devices) > 1
        per_step = len(devices) if self._dealt else 1
        targets = [None] if self._dealt else self._devices
        with tf.init_scope():
            self._datasets = [
                _prefetched(dataset, device, per_step)
                for dataset, device in zip(datasets, targets, strict=True)
            ]
            self._iterators = [_iterator(dataset) for dataset in self._datasets]

    def pull(self) -> list[Any]:
        """Takes the next element of each replica."""
        iterators = self._iterators * (len(self._devices) if self._dealt else 1)
        elements: list[Any] = []
        for iterator in iterators:
            # One after the other: pulled at once, an iterator that ends would cancel
            # the others, and their CancelledError could hide its OutOfRangeError.
            before = _ops_of(elements[-1]) if elements else []
            with tf.control_dependencies(before):
                elements.append(iterator.get_next())
        return elements

    def ready(self, elements: Sequence[Any]) -> list[tf.Operation]:
        """Returns the ops that pull the last element, after all others."""
        return super().ready(elements[-1:])

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Starts the iterators over, in a session or eagerly."""
        if session is not None:
            session.run([iterator.initializer for iterator in self._iterators])
            return
        for dataset, iterator in zip(self._datasets, self._iterators, strict=True):
            _restart(dataset, iterator)


def make_feed(
    input_fn: Callable[..., Any], devices: Sequence[str], input_mode: str
) -> Feed:
    """Calls an input_fn and makes what it returns feed the replicas.

    Args:
        input_fn: Takes an InputContext, or nothing; returns a Dataset, a function that
            returns an element, or an element (a nest of tensors).
        devices: `devices[r]` is where replica r runs.
        input_mode: "per_replica": input_fn is called once per replica; a Dataset made
            without an InputContext is dealt, element by element, since every replica
            would see all of it. "per_worker": it is called once, and dealt.

    Raises:
        InputError: What it returns cannot feed a step.
    """
    takes_context = _takes_context(input_fn)
    count = 1 if input_mode == "per_worker" else len(devices)
    sources: list[Any] = []
    for pipeline_id in range(count):
        info = InputContext(pipeline_id, len(devices), pipeline_id, count)
        source = input_fn(info) if takes_context else input_fn()
        checks.check_source(source, input_fn, input_mode)
        sources.append(source)
        if not takes_context and isinstance(source, tf.data.Dataset):
            break  # one pipeline, dealt: each element once, however it is shuffled
    kinds = {checks.source_kind(source) for source in sources}
    if len(kinds) > 1:
        raise errors.InputError(
            errors.compose(
                f"input_fn {checks.name_of(input_fn)} returns different kinds of input "
                f"for different replicas: {', '.join(sorted(kinds))}.",
                errors.sites_of("input_fn", input_fn),
                "return the same kind for every replica.",
            )
        )
    if kinds == {"a Dataset"}:
        checks.check_alike([source.element_spec for source in sources])
        return DatasetFeed(sources, devices)
    return ValuesFeed(sources, devices)


def _takes_context(input_fn: Callable[..., Any]) -> bool:
    """Whether an input_fn has a parameter for the InputContext."""
    required = checks.required(input_fn)
    if len(required) > 1 or any(p.kind == p.KEYWORD_ONLY for p in required):
        names = ", ".join(p.name for p in required)
        raise errors.InputError(
            errors.compose(
                f"input_fn {checks.name_of(input_fn)} must be given {names}.",
                errors.sites_of("input_fn", input_fn),
                "let it take an InputContext, or nothing.",
            )
        )
    named = any(
        p.name in _CONTEXT_NAMES and p.kind != p.KEYWORD_ONLY
        for p in checks.parameters(input_fn)[:1]
    )
    return bool(required) or named


def _prefetched(
    dataset: tf.data.Dataset, device: str | None, per_step: int
) -> tf.data.Dataset:
    """Keeps the next elements ready, on the replica's device if that is no CPU."""
    dataset = _without_autotuner(dataset)
    if device is not None and tf.DeviceSpec.from_string(device).device_type != "CPU":
        return dataset.apply(tf.data.experimental.prefetch_to_device(device, _PREFETCH))
    return dataset.prefetch(_PREFETCH * per_step)


def _without_autotuner(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Switches tf.data's autotuner off, unless the user has chosen.

    TensorFlow 2.21 sometimes misses the end of an autotuner's thread and waits, holding
    Python's lock, until the thread looks up by itself: up to a minute for each iterator
    that is freed or started over. What is set to AUTOTUNE uses all cores instead.
    """
    with warnings.catch_warnings():
        # In a tf.Graph TensorFlow warns that options may be unknown. Those of a loaded
        # dataset are; to it, ours apply.
        warnings.simplefilter("ignore")
        chosen = dataset.options().autotune.enabled
    if chosen is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _iterator(dataset: tf.data.Dataset) -> Any:
    """Returns an iterator that `_restart` or its initializer can start over."""
    if tf.executing_eagerly():
        return iter(dataset)
    iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
    # A MonitoredSession runs the table initialisers; nothing more is needed there.
    tf.compat.v1.add_to_collection(
        tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer
    )
    return iterator


def _restart(dataset: tf.data.Dataset, iterator: Any) -> None:
    """Starts an eager iterator over, which a traced step has captured."""
    (resource,) = tf.nest.flatten(iterator, expand_composites=True)
    variant = tf.data.experimental.to_variant(dataset)
    tf.raw_ops.MakeIterator(dataset=variant, iterator=resource)


def _ops_of(element: Any) -> list[tf.Operation]:
    """Returns the ops that make an element's tensors."""
    tensors = tf.nest.flatten(element, expand_composites=True)
    return list(dict.fromkeys(t.op for t in tensors if tf.is_symbolic_tensor(t)))


def _is_there(source: Any) -> bool:
    """Whether a source consists of values, and not of what has yet to be computed."""
    leaves = tf.nest.flatten(source, expand_composites=True)
    return checks.source_kind(source) != "a function" and not any(
        map(tf.is_symbolic_tensor, leaves)
    )


def _identities(element: Any, source: Any) -> Any:
    """Makes an element of tensors that belong to the graph being built.

    Raises:
        InputError: What TensorFlow has a spec for is no tensor after all, such as an
            array of objects.
    """
    try:
        return tf.nest.map_structure(
            lambda leaf: tf.identity(base.usable(leaf)), element, expand_composites=True
        )
    except base.UNCONVERTED as error:
        told = f"what is no nest of tensors ({errors.told(error)})"
        raise checks.useless("the function", source, told) from error


def columns(elements: Sequence[Any]) -> list[list[tf.Tensor]]:
    """Returns the tensors of all replicas' elements, [k][r], if their shapes are alike.

    Raises:
        CloneError: A static shape differs; what a step builds may depend on it.
    """
    flat = [tf.nest.flatten(element, expand_composites=True) for element in elements]
    made = [list(column) for column in zip(*flat, strict=True)]
    for column in made:
        for r, tensor in enumerate(column):
            if str(tensor.shape) != str(
                column[0].shape
            ):  # unknown ones are never equal
                raise errors.CloneError(
                    errors.compose(
                        'with build="clone", all replicas are fed tensors of one '
                        "static shape.",
                        [
                            f"replica 0: {column[0].shape}",
                            f"replica {r}: {tensor.shape}",
                        ],
                        "let input_fn give equal shapes (of a Dataset, "
                        "drop_remainder=True); or build every replica by itself, "
                        'build="trace".',
                    )
                )
    return made
