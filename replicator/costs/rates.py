# SPDX-License-Identifier: Apache-2.0
"""The costs of work, and from these the cost of each all_reduce algorithm.

The model: an algorithm runs ops, passes tensors from device to device, and touches
bytes, which are sent over a link, summed or concatenated. Devices that share the cores
of one process work one after another, so the cost is that of all work; and passing a
tensor copies nothing. Devices that work in parallel wait for the longest chain.

Source: the linear model of latency and bandwidth is that of Thakur, Rabenseifner and
Gropp 2005, Optimization of collective communication operations in MPICH.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.cluster import state
from replicator.costs import hosts

VARIABLE = "REPLICATOR_CALIBRATION"  # the environment variable that names a file
KINDS = ("cpu", "gpu", "hosts")


@dataclasses.dataclass(frozen=True)
class Rates:
    """The costs of work on one kind of device, in seconds, or seconds per byte.

    Example:
        >>> calibration = replicator.strategy.Resources(("CPU:0", "CPU:1")).calibration
        >>> rates = calibration.of("hosts")
        >>> f"{rates.message + (64 << 20) * rates.link:.2f} s for 64 MiB"
        '0.10 s for 64 MiB'

    Attributes:
        op: Seconds to run an op.
        message: Seconds to pass a tensor to another device, however small.
        link: Seconds per byte sent to another device.
        add: Seconds per byte summed, of each operand.
        copy: Seconds per byte copied when slices are concatenated.
        apart: Whether devices work in parallel.
    """

    op: float
    message: float
    link: float
    add: float
    copy: float
    apart: bool


@dataclasses.dataclass(frozen=True)
class Work:
    """An amount of work: numbers of ops and messages, and bytes."""

    ops: float = 0
    messages: float = 0
    sent: float = 0
    added: float = 0
    copied: float = 0

    def seconds(self, rates: Rates) -> float:
        """Returns the time of all of it, in sequence."""
        return (
            self.ops * rates.op
            + self.messages * rates.message
            + self.sent * rates.link
            + self.added * rates.add
            + self.copied * rates.copy
        )


def _hub(r: int, n: int) -> tuple[Work, Work]:
    work = Work(1, 2 * (r - 1), 2 * (r - 1) * n, r * n)
    return work, work  # all work goes through the hub


def _shuffled(r: int, n: int) -> tuple[Work, Work]:
    work = Work(r + 2, 2 * (r - 1), 2 * (r - 1) * n / r, n, n)
    return _times(work, r), work


def _tree(r: int, n: int) -> tuple[Work, Work]:
    steps = math.ceil(math.log2(r))
    total = Work(4 * (r - 1), 2 * (r - 1), 2 * (r - 1) * n, 2 * (r - 1) * n)
    return total, Work(3 * steps, 2 * steps, 2 * steps * n, 2 * steps * n)


def _ring(r: int, n: int) -> tuple[Work, Work]:
    steps = r - 1
    work = Work(r + 1 + 3 * steps, 2 * steps, 2 * steps * n / r, 2 * steps * n / r, n)
    return _times(work, r), work


def _nccl(r: int, n: int) -> tuple[Work, Work]:
    work = Work(1, 2, 2 * (r - 1) * n / r, 2 * (r - 1) * n / r)  # in one kernel
    return _times(work, r), work


def _times(work: Work, count: int) -> Work:
    return Work(*(count * amount for amount in dataclasses.astuple(work)))


# For each algorithm: takes the numbers of replicas and bytes, and returns all work and
# the longest chain of it.
_WORK: Mapping[str, Callable[[int, int], tuple[Work, Work]]] = {
    "hub": _hub,
    "shuffled": _shuffled,
    "tree": _tree,
    "ring": _ring,
    "nccl": _nccl,
}

# The rates of "cpu" were measured by `python -m replicator.calibrate` with logical
# devices on 2 shared cores of an AMD EPYC with 32 MiB of L3; most of "copy" is the cost
# of fresh memory. In the same program all_reduce alone took, in multiples of the hub's
# time:
#
#            4 MiB, 2, 4, 8 replicas    64 MiB, 2, 4, 8 replicas
#   shuffled      4.2   4.0    9.3            3.9   3.0   4.1
#   tree          1.3   2.6    8.7            1.2   1.3   1.9
#   ring         13.0   5.9   16.7            3.9   3.0   4.3
#
# At 256 KiB and below, differences were under 1.4 ms and mostly noise. The rates of
# "gpu" were not measured: they assume launches of some microseconds, PCIe 4 and the
# memory of a recent card. The rates of "hosts" are from two processes on one machine
# over gRPC: 3 ms for a small all_reduce by a hub, 204 ms for one of 64 MiB.
_DEFAULTS = {
    "cpu": Rates(1e-7, 2.5e-6, 0.0, 5e-11, 5.5e-10, False),
    "gpu": Rates(1e-5, 1.5e-5, 5e-11, 2e-12, 2e-12, True),
    "hosts": Rates(1e-5, 7e-4, 1.5e-9, 5e-11, 5.5e-10, True),
}


@dataclasses.dataclass(frozen=True, eq=False)  # a mapping has no hash
class Calibration:
    """The costs of work on each kind of device: "cpu", "gpu", and between "hosts".

    `python -m replicator.calibrate` measures them, and `Replicator(calibration=...)`
    reads its file. Builders find them in `strategy.Resources`.

    Example:
        >>> import dataclasses
        >>> calibration = replicator.strategy.Resources(("CPU:0", "CPU:1")).calibration
        >>> gigabit = dataclasses.replace(calibration.of("hosts"), link=8e-9)
        >>> what_if = dataclasses.replace(calibration, rates={"hosts": gigabit})
        >>> for network in (calibration, what_if):
        ...     print(f"{network.seconds('hub', 'hosts', 2, 1 << 20):.4f} s")
        0.0047 s
        0.0183 s

    Attributes:
        rates: Measured rates of some of the kinds; the others have default rates. Those
            of "hosts" are of the slowest link, for which all wait.
        links: The rates of measured links between two hosts, by the names of the hosts,
            e.g. "/job:worker/replica:0/task:1".
    """

    rates: Mapping[str, Rates] = dataclasses.field(default_factory=dict)
    links: Mapping[frozenset[str], Rates] = dataclasses.field(default_factory=dict)

    def of(self, kind: str) -> Rates:
        """Returns the rates of a kind of device.

        Example:
            >>> devices = replicator.strategy.Resources(("GPU:0", "GPU:1"))
            >>> devices.calibration.of("gpu").link  # seconds per byte
            5e-11

        Args:
            kind: "cpu", "gpu", or "hosts" for communication between hosts.
        """
        return self.rates.get(kind, _DEFAULTS[kind])

    def between(self, one: str, other: str) -> Rates:
        """Returns the rates between two hosts: measured ones, or those of "hosts".

        Example:
            >>> hosts = [f"/job:worker/replica:0/task:{k}" for k in (0, 1)]
            >>> names = tuple(f"{host}/device:CPU:0" for host in hosts)
            >>> calibration = replicator.strategy.Resources(names).calibration
            >>> calibration.between(*hosts) == calibration.of("hosts")
            True

        Args:
            one: The name of a host, e.g. "/job:worker/replica:0/task:1".
            other: Another one's.
        """
        return self.links.get(frozenset((one, other)), self.of("hosts"))

    def seconds(self, algorithm: str, kind: str, replicas: int, nbytes: int) -> float:
        """Returns the seconds that an all_reduce takes.

        Example:
            >>> calibration = replicator.strategy.Resources(("GPU:0",)).calibration
            >>> for algorithm in ("hub", "ring"):
            ...     seconds = calibration.seconds(algorithm, "gpu", 8, 64 << 20)
            ...     print(f"{algorithm}: {1e3 * seconds:.1f} ms")
            hub: 48.3 ms
            ring: 6.8 ms

        Args:
            algorithm: "hub", "shuffled", "tree", "ring" or "nccl".
            kind: "cpu", "gpu" or "hosts".
            replicas: The number of participants.
            nbytes: The size of the tensor, in bytes.
        """
        rates = self.of(kind)
        total, chain = _WORK[algorithm](replicas, nbytes)
        return (chain if rates.apart else total).seconds(rates)

    def seconds_in_levels(
        self, algorithm: str, within: str, replicas: int, count: int, nbytes: int
    ) -> float:
        """Returns the seconds of an all_reduce within hosts, then between them.

        Example:
            >>> calibration = replicator.strategy.Resources(("GPU:0",)).calibration
            >>> levels = calibration.seconds_in_levels("ring", "gpu", 4, 2, 64 << 20)
            >>> flat = calibration.seconds("ring", "hosts", 8, 64 << 20)
            >>> f"two levels: {levels:.2f} s, one: {flat:.2f} s"
            'two levels: 0.16 s, one: 0.23 s'

        Args:
            algorithm: The algorithm between hosts, as for `seconds`; within each, a hub
                reduces and distributes.
            within: The kind of the devices of a host: "cpu" or "gpu".
            replicas: The number of replicas per host.
            count: The number of hosts.
            nbytes: The size of the tensor, in bytes.
        """
        within_hosts = (
            self.seconds("hub", within, replicas, nbytes) if replicas > 1 else 0.0
        )
        return within_hosts + self.seconds(algorithm, "hosts", count, nbytes)

    def to_json(self) -> str:
        """Returns the JSON text of the measured rates.

        Example:
            >>> import dataclasses
            >>> calibration = replicator.strategy.Resources(("CPU:0",)).calibration
            >>> slow = dataclasses.replace(calibration.of("cpu"), message=1e-4)
            >>> what_if = dataclasses.replace(calibration, rates={"cpu": slow})
            >>> _ = pathlib.Path("rates.json").write_text(what_if.to_json())
            >>> repl = replicator.Replicator(
            ...     ["CPU:0", "CPU:1"], calibration="rates.json")
        """
        kinds = {kind: dataclasses.asdict(rates) for kind, rates in self.rates.items()}
        facts: dict[str, Any] = {"rates": kinds}
        if self.links:
            facts["links"] = [
                {"hosts": sorted(ends), **dataclasses.asdict(rates)}
                for ends, rates in self.links.items()
            ]
        return json.dumps(facts, indent=1)


def kind_of(devices: Sequence[str]) -> str:
    """Returns the kind, of KINDS, of communication between devices."""
    if hosts.are_several(devices):
        return "hosts"
    types = {tf.DeviceSpec.from_string(device).device_type for device in devices}
    return "cpu" if types == {"CPU"} else "gpu"


def nccl_reaches(devices: Sequence[str]) -> bool:
    """Whether devices are GPUs of one host, each a GPU of its own.

    NCCL refuses logical devices that are parts of the same GPU.
    """
    types = {tf.DeviceSpec.from_string(device).device_type for device in devices}
    return types == {"GPU"} and kind_of(devices) == "gpu" and not _share_one(devices)


def _share_one(devices: Sequence[str]) -> bool:
    """Whether two of these devices are parts of the same GPU of this process."""
    wholes: list[int] = []  # the GPU of each logical one
    for k, gpu in enumerate(tf.config.get_visible_devices("GPU")):
        parts = tf.config.get_logical_device_configuration(gpu) or [gpu]
        wholes += [k] * len(parts)
    task = state.own_task()
    specs = [tf.DeviceSpec.from_string(device) for device in devices]
    indices = [
        spec.device_index or 0
        for spec in specs
        if (spec.job, spec.task) == (task.job, task.task)
    ]
    used = [wholes[index] for index in indices if index < len(wholes)]
    return len(set(used)) < len(used)


def load(path: str | os.PathLike[str] | None) -> Calibration:
    """Reads a file that `python -m replicator.calibrate` wrote.

    Args:
        path: The file; None: the one that the environment variable names, or the
            defaults if it is not set.

    Raises:
        ArgumentError: The file does not exist or holds something else.
    """
    source = path if path is not None else os.environ.get(VARIABLE) or None
    if source is None:
        return Calibration()
    try:
        return _read(source)
    except _UNREADABLE as error:
        origin = "" if path is not None else f", which {VARIABLE} names,"
        raise errors.ArgumentError(
            f"cannot read a calibration from {errors.repr_of(source)}{origin}: "
            f"{errors.summary(error)}.",
            fix="name a file that `python -m replicator.calibrate --output=FILE` has "
            "written.",
        ) from error


_UNREADABLE = (
    *(OSError, AttributeError, TypeError, ValueError),
    *(ArithmeticError, LookupError, RecursionError),
)


def _read(path: str | os.PathLike[str]) -> Calibration:
    """Reads rates from a file; raises one of _UNREADABLE if there are none.

    Not from an int, which is somebody else's open file that reading would close; nor
    from a pipe or a device, which may never end.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError("a path must be a str or a PathLike")
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("it is not a regular file")
    with open(path, encoding="utf-8") as file:
        facts = json.load(file)
    kinds = facts["rates"]
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise ValueError(f"rates are of {', '.join(KINDS)}, not of {unknown}")
    return Calibration(
        {kind: _rates(costs) for kind, costs in kinds.items()},
        dict(_link(link) for link in facts.get("links", ())),  # of clusters only
    )


def _link(facts: Mapping[str, Any]) -> tuple[frozenset[str], Rates]:
    """Returns the hosts of a link, and its rates."""
    one, other = facts["hosts"]
    if not (isinstance(one, str) and isinstance(other, str)) or one == other:
        raise ValueError("the hosts of a link must be two different names")
    costs = {name: cost for name, cost in facts.items() if name != "hosts"}
    return frozenset((one, other)), _rates(costs)


def _rates(facts: Mapping[str, Any]) -> Rates:
    names = {field.name for field in dataclasses.fields(Rates)}
    if set(facts) != names or type(facts["apart"]) is not bool:
        raise ValueError(f"rates must be {', '.join(sorted(names))}; apart is a bool")
    costs = {name: _rate(facts[name]) for name in names - {"apart"}}
    return Rates(**costs, apart=facts["apart"])


def _rate(value: Any) -> float:
    """Returns a JSON number as a rate; raises an error if it overflows a float."""
    if type(value) not in (int, float) or not 0 <= float(value) < math.inf:
        raise ValueError(f"a rate must be 0 or more, not {errors.repr_of(value)}")
    return float(value)
