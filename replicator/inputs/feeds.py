# SPDX-License-Identifier: Apache-2.0
"""Feeds: give each replica its element in the graph of a step.

An input_fn is called once per device (or once in all, if its dataset is dealt), and
its result becomes a Feed. Replicas pull one after another, before anything else in the
step, so an exhausted input ends the step on every replica or on none.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import graphs
from replicator._tf import traces as tf_traces
from replicator.cluster.peers import Peers
from replicator.graph.passes import random
from replicator.inputs import (
    agreed_ends,
    checks,
    ends,
    iterators,
    moving,
    places,
    shards,
)
from replicator.primitives import base

SCOPE = "step_inputs"  # the name scope of the ops that pull
ELEMENT = "element_"  # and in it, with a number, of the op that takes an element


class Feed(abc.ABC):
    """Supplies the replicas of a step with their elements."""

    @abc.abstractmethod
    def pull(self) -> list[Any]:
        """Adds the pulling ops to the default graph; returns each replica's element."""

    def ready(self, elements: Sequence[Any]) -> list[tf.Operation]:
        """Returns ops after which every replica has its element; they may fail."""
        return list(dict.fromkeys(op for e in elements for op in _ops_of(e)))

    def agree(  # noqa: B027, most have no end
        self, peers: Peers, compared: agreed_ends.ComparedElements | None = None
    ) -> None:
        """Makes the inputs of all processes end together; every process calls it.

        Args:
            peers: The processes.
            compared: The elements, if all processes read the same.
        """

    @abc.abstractmethod
    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Restarts from the first element, if the feed has state."""

    @property
    def divides(self) -> bool:
        """Whether the elements are `Shard`s, whose contents step_fn takes."""
        return False

    @property
    def goes_on(self) -> bool:
        """Whether the feed keeps state from step to step."""
        return False

    @property
    def iterators(self) -> Sequence[tuple[Any, str | None]]:
        """The iterators that live from step to step, each with its host's CPU."""
        return ()

    def warn_of_rest(self, last_round: int | None) -> None:  # noqa: B027, most have no end
        """Warns once if elements at the end do not fill a round; see `ends.Warner`."""

    def note_failure(self) -> None:  # noqa: B027, most count nothing
        """Records that a step has failed, perhaps in mid-round."""


class ValuesFeed(Feed):
    """Feeds tensors, or the results of functions called in each build.

    Args:
        sources: The tensors or functions.
        devices: Where each is needed.
        replica_ids: The replica that each is for, which draws its own random numbers.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        devices: Sequence[str | None],
        replica_ids: Sequence[int],
    ) -> None:
        self._sources, self._devices = tuple(sources), tuple(devices)
        self._replica_ids = tuple(replica_ids)

    def pull(self) -> list[Any]:
        """Calls the functions on the replicas' devices, and copies tensors there."""
        elements: list[Any] = []
        control_inputs: list[tf.Operation] = []
        for source, device, replica_id in zip(
            self._sources, self._devices, self._replica_ids, strict=True
        ):
            with tf.device(device), tf.control_dependencies(control_inputs):
                element = source
                if checks.source_kind(source) == "a function":
                    element = _call(source, replica_id)
                    checks.check_element(element, "the function", source)
                elements.append(_identities(element, source))
            control_inputs = [] if _is_there(source) else _ops_of(elements[-1])
        checks.check_equal_specs([checks.specs(element) for element in elements])
        return elements

    def ready(self, elements: Sequence[Any]) -> list[tf.Operation]:
        """Returns the ops that may fail; constant tensors are there in any case."""
        pairs = zip(self._sources, elements, strict=True)
        return super().ready([e for source, e in pairs if not _is_there(source)])

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Does nothing: the functions are evaluated anew in each step."""


class DatasetFeed(Feed):
    """Feeds elements of datasets: one per replica, or one that is dealt to all.

    The iterators live as long as the feed, between calls of the step.

    Args:
        sited: The datasets, with their hosts.
        devices: The replicas' devices.
    """

    def __init__(self, sited: Sequence[moving.Sited], devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._is_divided = len(sited) == 1 and len(devices) > 1
        self._homes = [entry.home for entry in sited]
        per_step = len(devices) if self._is_divided else 1
        targets = [None] if self._is_divided else self._devices
        with tf.init_scope():
            self._lengths = ends.Lengths(sited, len(devices))
            self._datasets, self._iterators = [], []
            for entry, device in zip(sited, targets, strict=True):
                home = entry.home
                with places.at(home):
                    prefetched = iterators.prefetched(
                        entry.dataset, device, per_step, home
                    )
                    self._datasets.append(prefetched)
                    self._iterators.append(iterators.make(prefetched))
        self._warner = ends.Warner(self._lengths, len(devices))
        self._end: agreed_ends.AgreedEnd | None = None

    def agree(
        self, peers: Peers, compared: agreed_ends.ComparedElements | None = None
    ) -> None:
        """Makes the inputs of all processes end together."""
        self._end = agreed_ends.agree(peers, self._lengths.rounds, compared)

    def pull(self) -> list[Any]:
        """Takes the next element for each replica."""
        times = len(self._devices) if self._is_divided else 1
        sources = [*zip(self._iterators, self._homes, strict=True)] * times
        if self._end is not None:
            return self._end.elements(
                [iterator.get_next_as_optional for iterator, _ in sources]
            )
        elements: list[Any] = []
        for n, (iterator, home) in enumerate(sources):
            # In sequence: pulled at once, an iterator that ends would cancel the
            # others, and their CancelledError could hide its OutOfRangeError.
            control_inputs = _ops_of(elements[-1]) if elements else []
            with (
                places.at(home),
                tf.control_dependencies(control_inputs),
                tf.name_scope(f"{ELEMENT}{n}"),  # which step/eager_calls.py looks for
            ):
                elements.append(iterator.get_next())
        return elements

    def ready(self, elements: Sequence[Any]) -> list[tf.Operation]:
        """Returns the ops that pull the last element, after all others."""
        return super().ready(elements[-1:])

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Restarts the iterators, in a session or eagerly."""
        if session is not None:
            session.run([iterator.initializer for iterator in self._iterators])
            return
        for dataset, iterator, home in zip(
            self._datasets, self._iterators, self._homes, strict=True
        ):
            with places.at(home):
                iterators.restart(dataset, iterator)
        self._lengths.certain = True

    @property
    def goes_on(self) -> bool:
        """True: the iterators keep their positions."""
        return True

    @property
    def iterators(self) -> Sequence[tuple[Any, str | None]]:
        """The iterator of each dataset."""
        return [*zip(self._iterators, self._homes, strict=True)]

    def warn_of_rest(self, last_round: int | None) -> None:
        """Warns once if elements at the end do not fill a round."""
        self._warner.warn(last_round)

    def note_failure(self) -> None:
        """Marks the count of dropped elements as unknown: a round may be incomplete."""
        self._lengths.certain = False


class ShardsFeed(Feed):
    """Feeds shards of a global batch, or of a round.

    Args:
        whole: The feed to divide.
        divide: Turns its elements into the replicas' shards.
        device: Where to divide; None: where the default graph runs.
    """

    def __init__(
        self,
        whole: Feed,
        divide: Callable[[list[Any]], list[shards.Shard]],
        device: str | None,
    ) -> None:
        self._whole, self._divide, self._device = whole, divide, device

    def agree(
        self, peers: Peers, compared: agreed_ends.ComparedElements | None = None
    ) -> None:
        """Has the whole feed agree on its end."""
        self._whole.agree(peers, compared)

    def pull(self) -> list[Any]:
        """Pulls from the whole feed, and divides the result."""
        with tf.device(self._device):
            return self._divide(self._whole.pull())

    @property
    def divides(self) -> bool:
        """True."""
        return True

    @property
    def goes_on(self) -> bool:
        """Whether the whole feed keeps state."""
        return self._whole.goes_on

    @property
    def iterators(self) -> Sequence[tuple[Any, str | None]]:
        """The iterators of the whole feed."""
        return self._whole.iterators

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Restarts the whole feed."""
        self._whole.initialize(session)


class PartFeed(Feed):
    """Feeds the local replicas from a feed for all replicas.

    Every process reads all elements, and uses those of its own replicas.

    Args:
        whole: The feed for all replicas.
        local: The ids of the replicas that are built here.
    """

    def __init__(self, whole: Feed, local: Sequence[int]) -> None:
        self._whole, self._local = whole, tuple(local)

    def agree(
        self, peers: Peers, compared: agreed_ends.ComparedElements | None = None
    ) -> None:
        """Has the whole feed agree on its end."""
        self._whole.agree(peers, compared)

    def pull(self) -> list[Any]:
        """Pulls all elements; returns those of the local replicas."""
        elements = self._whole.pull()
        return [elements[r] for r in self._local]

    @property
    def divides(self) -> bool:
        """Whether the whole feed does."""
        return self._whole.divides

    @property
    def goes_on(self) -> bool:
        """Whether the whole feed keeps state."""
        return self._whole.goes_on

    @property
    def iterators(self) -> Sequence[tuple[Any, str | None]]:
        """The iterators of the whole feed."""
        return self._whole.iterators

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Restarts the whole feed."""
        self._whole.initialize(session)

    def warn_of_rest(self, last_round: int | None) -> None:
        """Has the whole feed warn."""
        self._whole.warn_of_rest(last_round)

    def note_failure(self) -> None:
        """Tells the whole feed."""
        self._whole.note_failure()


def _ops_of(element: Any) -> list[tf.Operation]:
    """Returns the ops that produce an element's tensors."""
    tensors = tf.nest.flatten(element, expand_composites=True)
    return list(dict.fromkeys(t.op for t in tensors if tf.is_symbolic_tensor(t)))


def _call(function: Callable[[], Any], replica_id: int) -> Any:
    """Returns a function's element for a replica, with random numbers of its own.

    Raises:
        ReplicatorError: All replicas would draw the same ones.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    start, traces = graphs.operation_count(graph), tf_traces.Traces()
    try:
        with (
            random.separate_seeds(graph, replica_id),
            tf_traces.separate_traces(graph, replica_id, traces),
        ):
            element = checks.call(function, (), "the function")
    finally:
        traces.forget()
    random.check([graph.get_operations()[start:]], [replica_id])
    return element


def _is_there(source: Any) -> bool:
    """Whether a source consists of values that need no computation."""
    leaves = tf.nest.flatten(source, expand_composites=True)
    return checks.source_kind(source) != "a function" and not any(
        map(tf.is_symbolic_tensor, leaves)
    )


def placed(values: Any, device: str) -> Any:
    """Copies a nest of tensors, which may hold None, to a device."""
    with tf.device(device):
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.identity(leaf),
            values,
            expand_composites=True,
        )


def _identities(element: Any, source: Any) -> Any:
    """Copies an element into the graph being built.

    Raises:
        InputError: A leaf has a TypeSpec but is not a tensor after all, such as an
            array of objects.
    """
    try:
        return tf.nest.map_structure(
            lambda leaf: tf.identity(base.usable(leaf)), element, expand_composites=True
        )
    except base.UNCONVERTED as error:
        description = f"a value that is not a nest of tensors ({errors.summary(error)})"
        raise checks.unusable("the function", source, description) from error
