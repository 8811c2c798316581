"""How data reaches the replicas: pipelines, prefetching.

An input_fn is called once per device (or once in all, where its dataset is dealt). What
it returned becomes a Feed: something that gives each replica its element in the graph
of a step. Replicas pull one after the other, before anything else of the step happens,
so that an exhausted input ends the step on every replica or on none.
"""

from __future__ import annotations

import abc
import copy
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
    together,
)
from replicator.inputs.input_context import InputContext
from replicator.primitives import base
from replicator.world import World

_CONTEXT_NAMES = ("ctx", "context", "input_context")  # asked for, even with a default


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


def make_feed(
    inputs: Any,
    world: World,
    input_mode: str,
    remainder: str = "drop",
    peers: Peers | None = None,
) -> Feed:
    """Makes a Dataset, or what an input_fn returns, feed the replicas.

    Args:
        inputs: A Dataset; or an input_fn, which takes an InputContext, or nothing, and
            returns a Dataset, a function that returns an element, or an element (a nest
            of tensors).
        world: All replicas there are, and those that are built here, which are fed.
        input_mode: "per_replica": input_fn is called once per replica; a Dataset made
            without an InputContext is dealt, element by element, since every replica
            would see all of it. "per_worker": it is called once, and dealt.
            "global_batch": it is called once, and each element is split.
        remainder: What becomes of a last round that has not an element for each
            replica, "drop" or "pad".
        peers: The processes that build the other replicas, if there are any.

    Raises:
        InputError: What it returns cannot feed a step.
    """
    shared = True
    if isinstance(inputs, checks.DATASETS):
        checks.check_here(inputs)
        # A copy: what is kept for a dataset may not hold it, or both would stay.
        sources: list[Any] = [copy.copy(inputs)]
    else:
        sources, shared = _sources(inputs, world, input_mode)
    if not isinstance(sources[0], checks.DATASETS):
        return values_feed(sources, world, input_mode)
    checks.check_alike([source.element_spec for source in sources])
    if peers is None:
        return _datasets_feed(inputs, sources, world.devices, input_mode, remainder)
    if shared:
        together.check(inputs, sources[0], peers)
        devices = together.devices(world)
        whole = _datasets_feed(inputs, sources, devices, input_mode, remainder)
        feed: Feed = PartFeed(whole, world.local)
    else:
        if remainder == "pad":
            agreed_ends.refuse_padding()
        feed = _datasets_feed(inputs, sources, world.devices, input_mode, remainder)
    feed.agree(peers)
    return feed


def values_feed(sources: Sequence[Any], world: World, input_mode: str) -> Feed:
    """Makes functions or tensors feed the replicas; see `make_feed`.

    Args:
        sources: One per local replica; or one that is split.
        world: All replicas there are, and those that are built here, which are fed.
        input_mode: As there.
    """
    if input_mode != "global_batch":
        return ValuesFeed(sources, world.devices)
    host = places.middle(world.devices)
    feed = ShardsFeed(
        ValuesFeed(sources[:1], [host]),
        lambda whole: shards.split(whole[0], world.num_replicas),
        host,
    )
    return PartFeed(feed, world.local) if world.processes else feed


def _host_id(hosts: Sequence[int], world: World, replica_id: int | None) -> int:
    """Returns the host of a replica, or of the one pipeline there is."""
    if world.processes:
        return hosts[world.local[0]]
    return hosts[0 if replica_id is None else world.place(replica_id)]


def _sources(
    input_fn: Callable[..., Any], world: World, input_mode: str
) -> tuple[list[Any], bool]:
    """Calls an input_fn.

    Returns:
        What feeds each local replica, or one source for all replicas; and whether it is
        the latter.
    """
    takes_context = _takes_context(input_fn)
    per_replica = input_mode == "per_replica"
    count = world.num_replicas if per_replica else 1
    number = 0  # of the pipeline, if it is not that of one replica
    if input_mode == "per_worker" and world.processes:
        number, count = world.processes[world.local[0]], len(set(world.processes))
    hosts = world.processes or places.hosts(world.devices)
    sources: list[Any] = []
    for pipeline_id in world.local if per_replica else (number,):
        info = InputContext(
            pipeline_id if per_replica else world.local[0],
            world.num_replicas,
            pipeline_id,
            count,
            host_id=_host_id(hosts, world, pipeline_id if per_replica else None),
            num_hosts=max(hosts) + 1,
        )
        source = checks.called(input_fn, (info,) if takes_context else ())
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
    shared = input_mode == "global_batch" or (per_replica and not takes_context)
    return sources, shared or not (per_replica or world.processes)


def _datasets_feed(
    made_by: Any,
    datasets: Sequence[tf.data.Dataset],
    devices: Sequence[str],
    input_mode: str,
    remainder: str,
) -> Feed:
    """Makes datasets, one for each replica or for all of them, feed the replicas.

    A pipeline for replicas of several hosts stays in this process: it has one state.
    """
    middle, count = places.middle(devices), len(devices)
    if remainder == "pad" and input_mode != "global_batch" and len(datasets) > 1:
        rounds = _sited(made_by, [ends.together(datasets)], devices)
        return ShardsFeed(
            DatasetFeed(rounds, [places.cpu_beside(devices[0])]),
            lambda whole: ends.weighed(whole[0]),
            middle,
        )
    if remainder == "pad" and input_mode != "global_batch":
        filled = ends.padded(datasets[0], count - 1)
        sited = _sited(made_by, [filled], devices)
        return ShardsFeed(DatasetFeed(sited, devices), ends.weighed, middle)
    sited = _sited(made_by, datasets, devices)
    if input_mode == "global_batch":
        return ShardsFeed(
            DatasetFeed(sited, [places.cpu_beside(devices[0])]),
            lambda whole: shards.split(whole[0], count),
            middle,
        )
    return DatasetFeed(sited, devices)


def _sited(
    made_by: Any, datasets: Sequence[tf.data.Dataset], devices: Sequence[str]
) -> list[moving.Sited]:
    """Moves datasets to the hosts of the replicas that they feed."""
    fed = [devices] if len(datasets) == 1 else [[device] for device in devices]
    with tf.init_scope():
        sited = [
            moving.moved(iterators.without_autotuner(dataset), places.home(own))
            for dataset, own in zip(datasets, fed, strict=True)
        ]
    moving.warn_of_those_that_stay(sited, made_by)
    return sited


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
