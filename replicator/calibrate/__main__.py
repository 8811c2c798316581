# SPDX-License-Identifier: Apache-2.0
"""Measures the rates of this machine: `python -m replicator.calibrate --output=FILE`.

`Replicator(..., calibration=FILE)`, or the environment variable REPLICATOR_CALIBRATION,
then chooses algorithms by these rates. Prints the rates of the cost model
(costs/rates.py), and for each algorithm the measured time of all_reduce next to that of
the model. With --cluster it measures within and between the hosts to which
`replicator.connect()` connects, over each link between two of them.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import tensorflow as tf
from absl import app, flags

from replicator import command_line, devices, errors
from replicator.calibrate import clusters, measure
from replicator.costs import rates

_MOST_ROUNDS = 1000
_MOST_DIGITS = 12
_DEVICES = flags.DEFINE_list(
    "devices", None, "Devices of one kind; by default all accelerators, or 8 CPUs."
)
_REPLICAS = flags.DEFINE_list(
    "replicas", None, "Numbers of replicas; by default 2,4,8."
)
_SIZES = flags.DEFINE_list(
    "kibibytes", ["1", "16", "256", "4096", "65536"], "Sizes of the tensors."
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 5, "How often each is measured.", 1, _MOST_ROUNDS
)
_CLUSTER = flags.DEFINE_bool(
    "cluster", False, "Measures the cluster that the environment describes."
)
_OUTPUT = flags.DEFINE_string("output", None, "A file to write the rates to, as JSON.")


@command_line.interruptible
def main(argv: Sequence[str]) -> int:
    """Measures, prints and writes; returns the exit status."""
    try:
        if len(argv) > 1:
            raise ValueError(f"unknown argument {argv[1]!r}")
        for flag in (_DEVICES, _SIZES, _REPLICAS):
            if flag.value == []:
                raise ValueError(f"--{flag.name} is empty")
        sizes = [_positive("--kibibytes", size) for size in _SIZES.value]
        command_line.check_outputs(_OUTPUT)
        requested = [_positive("--replicas", count) for count in _REPLICAS.value or ()]
        if _CLUSTER.value:
            device_names, counts, calibration, names = _of_cluster()
        else:
            device_names, counts, calibration = _of_devices(requested)
            names = {}
        timings = [
            measure.measure_algorithms(
                device_names[:n], size << 10, _ROUNDS.value, calibration
            )
            for n in counts
            for size in sizes
        ]
        if _OUTPUT.value is not None:
            facts = json.loads(calibration.to_json())
            facts["timings"] = [dataclasses.asdict(timing) for timing in timings]
            pathlib.Path(_OUTPUT.value).write_text(json.dumps(facts, indent=1) + "\n")
        measure.show(calibration, timings, names)
    except (
        *(command_line.BadInput, errors.ReplicatorError),
        *(ValueError, OSError),
    ) as error:
        return command_line.fail(error)
    except tf.errors.OpError as error:  # e.g. too little memory
        return command_line.fail(error.message)
    return 0


def _of_devices(
    requested: Sequence[int],
) -> tuple[Sequence[str], Sequence[int], rates.Calibration]:
    """Measures devices of one host; returns them, the counts to time, and the rates."""
    names = [
        replica_devices[0]
        for replica_devices in devices.resolve(_DEVICES.value or _default())
    ]
    counts = requested or [n for n in (2, 4, 8) if n <= len(names)]
    if len(names) < 2:
        raise ValueError(f"expected two or more devices; there is only {names[0]}")
    for count in counts:
        if not 1 < count <= len(names):
            raise ValueError(
                f"--replicas was given {count}; expected 2 to {len(names)} devices"
            )
    measured = measure.measure_rates(names, _ROUNDS.value)
    calibration = rates.Calibration({rates.kind_of(names): measured})
    return names, counts, calibration


def _of_cluster() -> tuple[
    Sequence[str], Sequence[int], rates.Calibration, Mapping[str, str]
]:
    """Measures a cluster; also returns the names of its hosts."""
    if _DEVICES.value or _REPLICAS.value:
        raise ValueError("--cluster takes all devices; omit --devices and --replicas")
    measured = clusters.measure_cluster(_ROUNDS.value)
    return (
        measured.devices,
        [len(measured.devices)],
        measured.calibration,
        measured.names,
    )


def _default() -> list[str]:
    """Returns all accelerators, if there are several, else logical CPUs."""
    accelerators = tf.config.list_physical_devices("GPU")
    if len(accelerators) > 1:
        return [f"GPU:{k}" for k in range(len(accelerators))]
    return [f"CPU:{k}" for k in range(8)]


def _positive(flag: str, text: str) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS or not int(text):
        raise ValueError(
            f"{flag} was given {text[:50]!r}; expected a positive number of at most "
            f"{_MOST_DIGITS} digits"
        )
    return int(text)


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse)
