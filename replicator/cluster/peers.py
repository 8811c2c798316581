# SPDX-License-Identifier: Apache-2.0
"""Build-time agreement among the processes that each build a part of the world.

In between-graph mode every host runs the same program and builds its own graph. Before
anything runs, the processes exchange the facts that must agree through the key-value
store of TensorFlow's coordination service, which the first process hosts. A difference
is an error on every host; a graph without its counterpart would wait forever.

No state outlives a program: TensorFlow itself knows which processes have joined.
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

from replicator import errors
from replicator._tf import cluster
from replicator.cluster import clashes, differences, faults, waiting

_POLL = 0.25  # seconds between checks that the other processes are alive
_PROGRESS = 10.0  # seconds between warnings that name the process waited for
_LARGEST = 1_000_000  # characters per entry of the store
_numbers = itertools.count()  # numbers Replicators, equally in all processes
_checkpoints = itertools.count(1)  # numbers Checkpoints, likewise


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """This process's place among the processes that joined.

    Attributes:
        process: The number of this process.
        addresses: The addresses of all processes, by number.
    """

    process: int
    addresses: tuple[str, ...]

    @property
    def processes(self) -> range:
        """The numbers of all processes."""
        return range(len(self.addresses))


def process_group() -> ProcessGroup | None:
    """Returns this process's place among the joined ones; None if it is alone."""
    joined = cluster.joined()
    return None if joined is None else ProcessGroup(*joined)


def tell_devices(process: int, names: Sequence[str]) -> None:
    """Publishes this process's devices to the others; call it after joining."""
    cluster.store_put(f"replicator/devices/{process}", json.dumps(list(names)))


def devices(group: ProcessGroup, seconds: float) -> list[str]:
    """Returns the full device names of all processes, in process order.

    Args:
        group: The processes.
        seconds: How long to wait for processes that have not published theirs.

    Raises:
        ClusterError: A process did not publish its devices in time.
    """
    deadline = time.monotonic() + seconds
    names: list[str] = []
    for process in group.processes:
        text = None
        while text is None and time.monotonic() < deadline:
            text = cluster.store_get(f"replicator/devices/{process}", _POLL)
            if text is None:
                faults.check()
        if text is None:
            raise errors.ClusterError(
                f"host {process} ({group.addresses[process]}) did not report its "
                f"devices within {seconds:.0f} s.",
                fix="check that the same program runs there, and calls "
                "replicator.connect.",
            )
        names += json.loads(text)
    return names


class Peers:
    """The processes that build one Replicator, and what they exchange while building.

    Args:
        group: This process's place among them.
        monitor: The monitor of this process's activity; the program's by default.
        checkpoint: Whether they write a Checkpoint instead. Any number of these share
            one range of keys, as they broadcast only after they have exchanged facts.
    """

    def __init__(
        self,
        group: ProcessGroup,
        monitor: clashes.ActivityMonitor | None = None,
        checkpoint: bool = False,
    ) -> None:
        self._group = group
        self._number = -next(_checkpoints) if checkpoint else next(_numbers)
        self.failures: Iterator[int] = (
            itertools.count()
        )  # numbers the steps that failed at run time
        self._common: BaseException | None = None  # the error that all have raised
        self.keys = _CHECKPOINT_KEYS if checkpoint else Keys(self._number + 1)
        names = [self.name(k) for k in group.processes]
        self.monitor = monitor or clashes.monitor(group.process, names)

    @property
    def number(self) -> int:
        """The number of the Replicator, or Checkpoint, equal in all processes."""
        return self._number

    @property
    def process(self) -> int:
        """The number of this process."""
        return self._group.process

    @property
    def processes(self) -> range:
        """The numbers of all processes."""
        return self._group.processes

    def name(self, process: int) -> str:
        """Returns the name of a process in messages."""
        return f"host {process} ({self._group.addresses[process]})"

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """`order[k]` is the process whose value comes k-th in TensorFlow's gathers.

        TensorFlow sorts the members of a group in an order of its own, so the first
        access runs a gather; all processes must make it together.
        """
        if len(self.processes) == 1:
            return (0,)
        processes = tuple(self.processes)
        with faults.named(), tf.init_scope(), tf.device("CPU:0"):
            gathered = tf.raw_ops.CollectiveGatherV2(
                input=[self.process],
                group_size=len(processes),
                group_key=self.keys.group(processes),
                instance_key=self.keys.take(self.keys.next, 1),
                ordering_token=[],
            )
        return tuple(gathered.numpy().tolist())

    def exchange(self, activity: str, value: Any, line: str | None = None) -> list[Any]:
        """Sends a value to all processes and returns the values of all.

        Args:
            activity: What this process is about to do; the same in all processes.
            value: This process's value, as JSON.
            line: The user's line; the current one by default.

        Returns:
            The values of all processes, in process order.

        Raises:
            MismatchError: Another process does something else, or has failed.
            HostLostError: A process was lost.
        """
        return [entry["value"] for entry in self._entries(activity, value, line)]

    def _entries(
        self, activity: str, value: Any, line: str | None
    ) -> list[dict[str, Any]]:
        """As `exchange`, but returns the whole entries."""
        value = json.loads(json.dumps(value))  # as the others will read it
        entry = self._entry(activity, line or errors.user_line(), value)
        entries = self._exchange(entry)
        if any(e["activity"] != activity or e["of"] != self.number for e in entries):
            self._common = self._refusal(entries)
            raise self._common
        return entries

    def check_equal(self, activity: str, value: Any, fix: str) -> None:
        """Checks that all processes pass the same value.

        Args:
            activity: What this process is about to do.
            value: This process's value, as JSON.
            fix: How to resolve a difference, for the message.

        Raises:
            MismatchError: The values of two processes differ.
        """
        entries = self._entries(activity, value, None)
        for process in self.processes:
            pair = entries[0]["value"], entries[process]["value"]
            if pair[0] != pair[1]:
                texts = differences.describe(*pair)
                raise errors.MismatchError(
                    f"every host {activity}, and they differ.",
                    [
                        f"{self.name(k)}: {text} at {entries[k]['line']}"
                        for k, text in zip((0, process), texts, strict=True)
                    ],
                    fix,
                )

    def broadcast(self, words: tf.Tensor) -> tf.Tensor:
        """Returns the first process's int32 vector; called eagerly by all processes."""
        processes = tuple(self.processes)
        keys: dict[str, Any] = {
            "group_size": len(processes),
            "group_key": self.keys.group(processes),
            "instance_key": self.keys.take(self.keys.next, 1),
        }
        if len(processes) == 1:
            return words
        with faults.named(), tf.device("CPU:0"):
            if self.process == 0:
                return tf.raw_ops.CollectiveBcastSendV2(input=words, **keys)
            return tf.raw_ops.CollectiveBcastRecvV2(
                T=words.dtype, shape=words.shape, **keys
            )

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Reports an error raised in this block to the other processes.

        They wait for this process's next entry, which the report replaces. An error
        that all processes raised together needs no report: no process waits.
        """
        try:
            yield
        except errors.HostLostError:
            raise
        except Exception as error:
            if error is not self._common:
                self._common = error  # blocks may nest
                line = errors.line_of(error)
                line = errors.user_line() if line == errors.UNKNOWN else line
                with faults.named():
                    text = errors.summary(error)
                    if isinstance(error, errors.ReplicatorError):  # without the fix
                        text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                    entry = self._entry(None, line, text)
                    self._send(self.monitor.next_number(), entry)
            raise

    def _entry(self, activity: str | None, line: str, value: Any) -> dict[str, Any]:
        return {"of": self.number, "activity": activity, "line": line, "value": value}

    def _exchange(self, entry: dict[str, Any]) -> list[dict[str, Any]]:
        place = self.monitor.next_number()
        text = f"{entry['activity']} at {entry['line']}"
        with faults.named(), self.monitor.waiting(text):
            self._send(place, entry)
            return [
                entry
                if process == self.process
                else self._receive(place, process, entry)
                for process in self.processes
            ]

    def _send(self, place: int, entry: dict[str, Any]) -> None:
        data = zlib.compress(json.dumps(entry).encode())
        text = base64.b64encode(data).decode()
        parts = [text[k : k + _LARGEST] for k in range(0, len(text), _LARGEST)]
        for k, part in enumerate(parts[1:], 1):
            cluster.store_put(f"replicator/{place}/{self.process}/{k}", part)
        # The first part is written last: once it is there, so are all others.
        cluster.store_put(
            f"replicator/{place}/{self.process}/0", f"{len(parts)} {parts[0]}"
        )

    def _receive(
        self, place: int, process: int, entry: dict[str, Any]
    ) -> dict[str, Any]:
        key = f"replicator/{place}/{process}"
        count, _, text = self._wait(f"{key}/0", process, entry).partition(" ")
        for k in range(1, int(count)):
            text += self._wait(f"{key}/{k}", process, entry)
        reply: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
        return reply

    def _wait(self, key: str, process: int, entry: dict[str, Any]) -> str:
        start = last_warning = time.monotonic()
        patience = waiting.patience()
        while (value := cluster.store_get(key, _POLL)) is None:
            self.monitor.check()
            faults.check()
            now = time.monotonic()
            elapsed = now - start
            if elapsed <= patience and now - last_warning < _PROGRESS:
                continue
            last_warning = now
            activity = f"{entry['activity']} at {entry['line']}"
            if elapsed > patience:
                raise errors.MismatchError(
                    f"{self.name(process)} did not reach {activity} within "
                    f"{patience:g} s.",
                    fix="do the same things on every host, in the same order. If this "
                    "only takes one of them long, set the environment variable "
                    f"{waiting.PATIENCE} to more seconds on all.",
                )
            logging.warning(
                "%s is waiting for %s (%.0f s so far) to reach %s.",
                self.name(self.process),
                self.name(process),
                elapsed,
                activity,
            )
        return value

    def _refusal(self, entries: Sequence[dict[str, Any]]) -> errors.MismatchError:
        """Returns the error for processes that do different things."""
        failed = [k for k, entry in enumerate(entries) if entry["activity"] is None]
        sites = [
            f"{self.name(k)}: failed at {entry['line']}: {entry['value']}"
            if entry["activity"] is None
            else f"{self.name(k)}: {entry['activity']} at {entry['line']}"
            for k, entry in enumerate(entries)
        ]
        problem = "the hosts do different things."
        if failed:
            problem = f"{self.name(failed[0])} failed where the others continue."
        return errors.MismatchError(
            problem,
            sites,
            "create the same variables and build the same steps on every host, in the "
            "same order.",
        )


def telling(peers: Peers | None) -> contextlib.AbstractContextManager[None]:
    """Returns `peers.telling()`; a null context if there are no other processes."""
    return contextlib.nullcontext() if peers is None else peers.telling()


class Keys:
    """Allocates the group and instance keys that match collectives across processes.

    Keys derive only from facts that all processes share, so all allocate the same.

    Args:
        number: The number of the range: 0 for Checkpoints; each Replicator has its own.
    """

    _SHARE = 1 << 23  # instances per Replicator; TensorFlow's keys have 31 bits
    _GROUPS = 1 << 12

    def __init__(self, number: int) -> None:
        if number >= (1 << 31) // self._SHARE:
            raise errors.ClusterError(
                f"this program creates its {number}th Replicator, but at most 255 can "
                "be numbered.",
                fix="create one Replicator, and run all steps with it.",
            )
        self._base = number * self._SHARE
        self._first_group = number * self._GROUPS + 1
        self._next = 0
        self._groups: dict[tuple[int, ...], int] = {}

    @property
    def next(self) -> int:
        """The first unused number."""
        return self._next

    def take(self, first: int, count: int) -> int:
        """Reserves `count` numbers from `first` on; returns the first as a key."""
        self._next = max(self._next, first + count)
        if self._next > self._SHARE:
            raise errors.ClusterError(
                "the steps built so far communicate too often between hosts: at most "
                f"{self._SHARE} collectives can be numbered.",
                fix="build each step once, by `repl.build`, and call it again.",
            )
        return self._base + first

    def group(self, processes: tuple[int, ...]) -> int:
        """Returns a group's key; all processes ask for groups in the same order."""
        number = self._groups.setdefault(processes, len(self._groups))
        return self._first_group + number


_CHECKPOINT_KEYS = Keys(0)
