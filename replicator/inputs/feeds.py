# SPDX-License-Identifier: Apache-2.0
"""How data reaches the replicas: pipelines, prefetching.

An input_fn is called once per device (or once in all, where its dataset is dealt). What
it returned becomes a Feed: something that gives each replica its element in the graph
of a step. Replicas pull one after the other, before anything else of the step happens,
so that an exhausted input ends the step on every replica or on none.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.cluster.peers import Peers
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


class Feed(abc.ABC):
    """What gives the replicas of a step their elements."""

    @abc.abstractmethod
    def pull(self) -> list[Any]:
        """Adds the ops to the default graph; returns one element per replica."""

    def ready(self, elements: Sequence[Any]) -> list[tf.Operation]:
        """Returns the ops after which every replica has its element, which may fail."""
        return list(dict.fromkeys(op for own in elements for op in _ops_of(own)))

    def agree(self, peers: Peers) -> None:  # noqa: B027, most have no end
        """Has the inputs of all processes end together; all of them call it."""

    @abc.abstractmethod
    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Starts from the first element again, if the feed has a state."""

    @property
    def divides(self) -> bool:
        """Whether the elements are `Shard`s, of which step_fn is given the inside."""
        return False

    @property
    def goes_on(self) -> bool:
        """Whether there is something that goes on from step to step."""
        return False

    @property
    def iterators(self) -> Sequence[tuple[Any, str | None]]:
        """What goes on from step to step, each with the CPU of its host."""
        return ()

    def warn_of_rest(self, ended: bool) -> None:  # noqa: B027, most have no end
        """Warns once if elements at the end do not fill a round; see `ends.Warner`."""

    def note_failure(self) -> None:  # noqa: B027, most count nothing
        """Called when a step has failed, perhaps amid a round."""


class ValuesFeed(Feed):
    """Elements that are functions, called in each build, or tensors."""

    def __init__(self, sources: Sequence[Any], devices: Sequence[str | None]) -> None:
        self._sources, self._devices = tuple(sources), tuple(devices)

    def pull(self) -> list[Any]:
        """Calls the functions, on their devices, and copies the tensors to theirs."""
        elements: list[Any] = []
        before: list[tf.Operation] = []
        for source, device in zip(self._sources, self._devices, strict=True):
            with tf.device(device), tf.control_dependencies(before):
                element = source
                if checks.source_kind(source) == "a function":
                    element = checks.called(source, (), "the function")
                    checks.check_element(element, "the function", source)
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

    Args:
        sited: The datasets, each where it is.
        devices: The replicas'.
    """

    def __init__(self, sited: Sequence[moving.Sited], devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._dealt = len(sited) == 1 and len(devices) > 1
        self._homes = [own.home for own in sited]
        per_step = len(devices) if self._dealt else 1
        targets = [None] if self._dealt else self._devices
        with tf.init_scope():
            self._lengths = ends.Lengths(sited, len(devices))
            self._datasets, self._iterators = [], []
            for dataset, device, home in zip(
                self._lengths.datasets, targets, self._homes, strict=True
            ):
                with places.at(home):
                    ahead = iterators.prefetched(dataset, device, per_step, home)
                    self._datasets.append(ahead)
                    self._iterators.append(iterators.make(ahead))
        self._warner = ends.Warner(self._lengths, len(devices))
        self._end: agreed_ends.AgreedEnd | None = None

    def agree(self, peers: Peers) -> None:
        """Has the inputs of all processes end together."""
        self._end = agreed_ends.agree(peers, self._lengths.rounds)

    def pull(self) -> list[Any]:
        """Takes the next element of each replica."""
        times = len(self._devices) if self._dealt else 1
        sources = [*zip(self._iterators, self._homes, strict=True)] * times
        if self._end is not None:
            return self._end.elements(
                [iterator.get_next_as_optional for iterator, _ in sources]
            )
        elements: list[Any] = []
        for iterator, home in sources:
            # One after the other: pulled at once, an iterator that ends would cancel
            # the others, and their CancelledError could hide its OutOfRangeError.
            before = _ops_of(elements[-1]) if elements else []
            with places.at(home), tf.control_dependencies(before):
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
        for dataset, iterator, home in zip(
            self._datasets, self._iterators, self._homes, strict=True
        ):
            with places.at(home):
                iterators.restart(dataset, iterator)
        self._lengths.start_over()  # what was read ahead is gone, nothing is new yet

    @property
    def goes_on(self) -> bool:
        """True: the iterators do."""
        return True

    @property
    def iterators(self) -> Sequence[tuple[Any, str | None]]:
        """One for each dataset."""
        return [*zip(self._iterators, self._homes, strict=True)]

    def warn_of_rest(self, ended: bool) -> None:
        """Warns once if elements at the end do not fill a round."""
        self._warner.warn(ended)

    def note_failure(self) -> None:
        """Leaves open what is dropped at the end: a round may have lost elements."""
        self._lengths.certain = False


class ShardsFeed(Feed):
    """Elements that are parts of something: of a global batch, or of a round.

    Args:
        whole: Gives what is divided.
        divide: Makes of what that pulls the replicas' parts.
        device: Where that is done; None: where the default graph runs.
    """

    def __init__(
        self,
        whole: Feed,
        divide: Callable[[list[Any]], list[shards.Shard]],
        device: str | None,
    ) -> None:
        self._whole, self._divide, self._device = whole, divide, device

    def agree(self, peers: Peers) -> None:
        """As the whole does."""
        self._whole.agree(peers)

    def pull(self) -> list[Any]:
        """Pulls the whole, and divides it."""
        with tf.device(self._device):
            return self._divide(self._whole.pull())

    @property
    def divides(self) -> bool:
        """True."""
        return True

    @property
    def goes_on(self) -> bool:
        """Whether the whole does."""
        return self._whole.goes_on

    @property
    def iterators(self) -> Sequence[tuple[Any, str | None]]:
        """Those of the whole."""
        return self._whole.iterators

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Starts the whole over."""
        self._whole.initialize(session)


class PartFeed(Feed):
    """Elements of the replicas that are built here, of a feed of all there are.

    Every process that builds some reads all elements, and uses those of its own.

    Args:
        whole: Feeds all.
        local: The ids of those that are built here.
    """

    def __init__(self, whole: Feed, local: Sequence[int]) -> None:
        self._whole, self._local = whole, tuple(local)

    def agree(self, peers: Peers) -> None:
        """As the whole does."""
        self._whole.agree(peers)

    def pull(self) -> list[Any]:
        """Pulls all elements; returns those of the local replicas."""
        elements = self._whole.pull()
        return [elements[r] for r in self._local]

    @property
    def divides(self) -> bool:
        """Whether the whole does."""
        return self._whole.divides

    @property
    def goes_on(self) -> bool:
        """Whether the whole does."""
        return self._whole.goes_on

    @property
    def iterators(self) -> Sequence[tuple[Any, str | None]]:
        """Those of the whole."""
        return self._whole.iterators

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Starts the whole over."""
        self._whole.initialize(session)

    def warn_of_rest(self, ended: bool) -> None:
        """As the whole does."""
        self._whole.warn_of_rest(ended)

    def note_failure(self) -> None:
        """As the whole does."""
        self._whole.note_failure()


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


def placed(values: Any, device: str) -> Any:
    """Copies a nest of tensors, and None, to a device."""
    with tf.device(device):
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.identity(leaf),
            values,
            expand_composites=True,
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
