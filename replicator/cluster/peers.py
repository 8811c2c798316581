# SPDX-License-Identifier: Apache-2.0
"""What processes that each build a part of the world tell one another while they build.

In between-graph mode every host runs the same program and builds a graph of its own.
What has to be the same in all of them is told by way of the coordination service of
TensorFlow, whose store the first process keeps, before anything runs: a difference is
an error on every host, where a graph without its counterpart would wait forever.

Nothing is kept between programs: what TensorFlow was told says who the peers are.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import itertools
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import _tf, errors
from replicator.cluster import clashes, differences, faults

_PATIENCE = 600.0  # seconds for the slowest: input pipelines may take long to make
_POLL = 0.25  # seconds until this process looks whether the others are still there
_PROGRESS = 10.0  # seconds between two lines that say for whom this process waits
_LARGEST = 1_000_000  # characters of one entry of the store
_numbers = itertools.count()  # of the Replicators of this process, alike in all


@dataclasses.dataclass(frozen=True)
class Facts:
    """Which of several processes this is.

    Attributes:
        own: Its number.
        addresses: Those of all.
    """

    own: int
    addresses: tuple[str, ...]

    @property
    def everyone(self) -> range:
        """The numbers of all processes."""
        return range(len(self.addresses))


def facts() -> Facts | None:
    """Returns which of several processes this is; None if it is alone."""
    joined = _tf.joined()
    return None if joined is None else Facts(*joined)


def tell_devices(own: int, names: Sequence[str]) -> None:
    """Tells all processes on which devices this one computes, once it has joined."""
    _tf.store_put(f"replicator/devices/{own}", json.dumps(list(names)))


def devices(known: Facts, seconds: float) -> list[str]:
    """Returns the full names of the devices of all processes, in their order.

    Args:
        known: The processes.
        seconds: How long to wait for those that have not said so yet.

    Raises:
        ClusterError: Some have not by then.
    """
    until = time.monotonic() + seconds
    names: list[str] = []
    for process in known.everyone:
        told = None
        while told is None and time.monotonic() < until:
            told = _tf.store_get(f"replicator/devices/{process}", _POLL)
            if told is None:
                faults.check()
        if told is None:
            raise errors.ClusterError(
                errors.compose(
                    f"host {process} ({known.addresses[process]}) did not say within "
                    f"{seconds:.0f} s which devices it has.",
                    fix="see that the same program runs there, and calls "
                    "replicator.connect.",
                )
            )
        names += json.loads(told)
    return names


class Peers:
    """The processes that build one Replicator; each tells the others what it builds.

    Args:
        known: Which of them this is.
        doing: What this process does; that of the program, unless given.
    """

    def __init__(self, known: Facts, doing: clashes.Doing | None = None) -> None:
        self._facts = known
        self._number = next(_numbers)
        self.failures: Iterator[int] = (
            itertools.count()
        )  # of steps that failed while they ran
        self._common: BaseException | None = None  # that all processes have raised
        self.keys = Keys(self._number)
        names = [self.name(k) for k in known.everyone]
        self.doing = doing or clashes.doing(known.own, names)

    @property
    def number(self) -> int:
        """That of the Replicator, which is the same in all processes."""
        return self._number

    @property
    def own(self) -> int:
        """The number of this process."""
        return self._facts.own

    @property
    def everyone(self) -> range:
        """The numbers of all processes."""
        return self._facts.everyone

    def name(self, process: int) -> str:
        """Returns what a process is called in messages."""
        return f"host {process} ({self._facts.addresses[process]})"

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Whose part is the k-th of what TensorFlow gathers of all processes.

        Found out when it is first asked for, by all at once: TensorFlow sorts the
        members of a group in a way of its own.
        """
        if len(self.everyone) == 1:
            return (0,)
        everyone = tuple(self.everyone)
        with faults.named(), tf.init_scope(), tf.device("CPU:0"):
            found = tf.raw_ops.CollectiveGatherV2(
                input=[self.own],
                group_size=len(everyone),
                group_key=self.keys.group(everyone),
                instance_key=self.keys.take(self.keys.next, 1),
                ordering_token=[],
            )
        return tuple(found.numpy().tolist())

    def exchange(self, what: str, said: Any, line: str | None = None) -> list[Any]:
        """Tells all processes something, and returns what each of them says.

        Args:
            what: What this process is about to do; all do the same.
            said: A JSON value.
            line: The user's line; the one at hand, unless given.

        Returns:
            What each said, in their order.

        Raises:
            MismatchError: Another process does something else, or has failed.
            HostLostError: One was lost.
        """
        return [one["said"] for one in self._alike(what, said, line)]

    def _alike(self, what: str, said: Any, line: str | None) -> list[dict[str, Any]]:
        """As `exchange`; returns all that each tells."""
        said = json.loads(json.dumps(said))  # as the others will read it
        entry = self._entry(what, line or errors.user_line(), said)
        found = self._exchange(entry)
        if any(one["what"] != what or one["of"] != self.number for one in found):
            self._common = self._refusal(found)
            raise self._common
        return found

    def same(self, what: str, said: Any, fix: str) -> None:
        """Raises unless all processes say the same.

        Args:
            what: What this process is about to do.
            said: A JSON value.
            fix: The way out.

        Raises:
            MismatchError: One says something else.
        """
        found = self._alike(what, said, None)
        for process in self.everyone:
            pair = found[0]["said"], found[process]["said"]
            if pair[0] != pair[1]:
                shown = differences.shown(*pair)
                raise errors.MismatchError(
                    errors.compose(
                        f"every host {what}, and they differ.",
                        [
                            f"{self.name(k)}: {text} at {found[k]['line']}"
                            for k, text in zip((0, process), shown, strict=True)
                        ],
                        fix,
                    )
                )

    def broadcast(self, words: tf.Tensor) -> tf.Tensor:
        """Returns an int32 vector as the first process has it; eagerly, in all."""
        everyone = tuple(self.everyone)
        keys: dict[str, Any] = {
            "group_size": len(everyone),
            "group_key": self.keys.group(everyone),
            "instance_key": self.keys.take(self.keys.next, 1),
        }
        if len(everyone) == 1:
            return words
        with faults.named(), tf.device("CPU:0"):
            if self.own == 0:
                return tf.raw_ops.CollectiveBcastSendV2(input=words, **keys)
            return tf.raw_ops.CollectiveBcastRecvV2(
                T=words.dtype, shape=words.shape, **keys
            )

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Returns a block of which an error is told to the others: all do what it does.

        They wait for what this process was to say next. What all have learned together
        is an error in all of them, and nobody waits.
        """
        try:
            yield
        except errors.HostLostError:
            raise
        except Exception as error:
            if error is not self._common:
                self._common = error  # blocks may be inside of one another
                line = errors.line_of(error)
                line = errors.user_line() if line == errors.UNKNOWN else line
                with faults.named():
                    text = errors.told(error)
                    if isinstance(error, errors.ReplicatorError):  # without the fix
                        text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    entry = self._entry(None, line, text)
                    self._tell(self.doing.next_number(), entry)
            raise

    def _entry(self, what: str | None, line: str, said: Any) -> dict[str, Any]:
        return {"of": self.number, "what": what, "line": line, "said": said}

    def _exchange(self, entry: dict[str, Any]) -> list[dict[str, Any]]:
        place = self.doing.next_number()
        text = f"{entry['what']} at {entry['line']}"
        with faults.named(), self.doing.waiting(text):
            self._tell(place, entry)
            return [
                entry if process == self.own else self._hear(place, process, entry)
                for process in self.everyone
            ]

    def _tell(self, place: int, entry: dict[str, Any]) -> None:
        data = zlib.compress(json.dumps(entry).encode())
        text = base64.b64encode(data).decode()
        parts = [text[k : k + _LARGEST] for k in range(0, len(text), _LARGEST)]
        for k, part in enumerate(parts[1:], 1):
            _tf.store_put(f"replicator/{place}/{self.own}/{k}", part)
        # The first comes last: with it, all are there.
        _tf.store_put(f"replicator/{place}/{self.own}/0", f"{len(parts)} {parts[0]}")

    def _hear(self, place: int, process: int, entry: dict[str, Any]) -> dict[str, Any]:
        key = f"replicator/{place}/{process}"
        count, _, text = self._wait(f"{key}/0", process, entry).partition(" ")
        for k in range(1, int(count)):
            text += self._wait(f"{key}/{k}", process, entry)
        heard: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
        return heard

    def _wait(self, key: str, process: int, entry: dict[str, Any]) -> str:
        start = said = time.monotonic()
        while (value := _tf.store_get(key, _POLL)) is None:
            faults.check()
            self.doing.check()
            now = time.monotonic()
            passed = now - start
            if now - said < _PROGRESS:
                continue
            said = now
            doing = f"{entry['what']} at {entry['line']}"
            if passed > _PATIENCE:
                raise errors.MismatchError(
                    errors.compose(
                        f"{self.name(process)} did not come to {doing} within "
                        f"{_PATIENCE:.0f} s.",
                        fix="let the program do the same on every host, in the same "
                        "order.",
                    )
                )
            logging.warning(
                "%s waits for %s since %.0f s, to come to %s.",
                *(self.name(self.own), self.name(process), passed, doing),
            )
        return value

    def _refusal(self, found: Sequence[dict[str, Any]]) -> errors.MismatchError:
        """Returns the error of processes that do not do the same."""
        failed = [k for k, one in enumerate(found) if one["what"] is None]
        sites = [
            f"{self.name(k)}: failed at {one['line']}: {one['said']}"
            if one["what"] is None
            else f"{self.name(k)}: {one['what']} at {one['line']}"
            for k, one in enumerate(found)
        ]
        problem = "the hosts do not do the same."
        if failed:
            problem = f"{self.name(failed[0])} failed where the others go on."
        return errors.MismatchError(
            errors.compose(
                problem,
                sites,
                "let the program make the same variables and build the same steps on "
                "every host, in the same order.",
            )
        )


def telling(peers: Peers | None) -> contextlib.AbstractContextManager[None]:
    """Returns the block that `Peers.telling` is, if there are other processes."""
    return contextlib.nullcontext() if peers is None else peers.telling()


class Keys:
    """Numbers by which collectives of all processes find one another.

    They derive from what all processes were told, so that all come to the same.

    Args:
        number: That of the Replicator; each has numbers of its own.
    """

    _SHARE = 1 << 23  # instances of each Replicator; TensorFlow's keys have 31 bits
    _GROUPS = 1 << 12

    def __init__(self, number: int) -> None:
        if number >= (1 << 31) // self._SHARE:
            raise errors.ClusterError(
                errors.compose(
                    f"this program makes its {number + 1}th Replicator, and there are "
                    "numbers for 256.",
                    fix="make one Replicator, and run all steps by it.",
                )
            )
        self._base = number * self._SHARE
        self._first_group = number * self._GROUPS + 1
        self._next = 0
        self._groups: dict[tuple[int, ...], int] = {}

    @property
    def next(self) -> int:
        """The first number that this process has not used."""
        return self._next

    def take(self, first: int, count: int) -> int:
        """Notes that numbers from `first` on are used; returns the first as a key."""
        self._next = max(self._next, first + count)
        if self._next > self._SHARE:
            raise errors.ClusterError(
                errors.compose(
                    "the steps that were built communicate too often between hosts: "
                    f"there are numbers for {self._SHARE} collectives.",
                    fix="build steps once and call them again, by `repl.build`.",
                )
            )
        return self._base + first

    def group(self, processes: tuple[int, ...]) -> int:
        """Returns the key of a group of processes; asked in the same order on all."""
        number = self._groups.setdefault(processes, len(self._groups))
        return self._first_group + number
