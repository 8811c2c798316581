# SPDX-License-Identifier: Apache-2.0
"""Prints the facts that a bug report needs: `python -m replicator`.

Versions, devices, the calibration and the installed optional packages, in Markdown, to
be pasted into a report. If a fact cannot be determined, the reason is printed in its
place.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator, Sequence

from absl import app

from replicator import command_line

_NEEDED = ("tensorflow", "keras", "numpy", "absl-py", "protobuf", "PyYAML")
_OPTIONAL = (
    *("rich", "matplotlib", "asyncssh", "tqdm", "tf_keras", "dm-sonnet"),
    *("tensorboard", "tensorflow-probability", "transformers", "keras-hub"),
)
_VARIABLES = ("REPLICATOR_", "TF_", "XLA_", "CUDA_VISIBLE", "NCCL_", "KERAS_", "OMP_")
_OTHERS = ("TF_CLI_", "TF_VAR_", "TF_TOKEN_")  # Terraform's variables
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


@command_line.interruptible
def main(argv: Sequence[str]) -> int:
    """Prints all sections; returns the exit status."""
    if len(argv) > 1:
        return command_line.fail(
            f"unknown argument {argv[1]!r}; usage: python -m replicator"
        )
    for title, lines in _SECTIONS.items():
        print(f"### {title}\n")
        for line in _tried(lines):
            print(f"- {line}")
        print()
    return 0


def _tried(lines: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Yields lines; an error that ends them early becomes a line."""
    try:
        yield from lines()
    except Exception as error:  # anything broken may be what the report is about
        text = " ".join(f"{type(error).__name__}: {error}".split())
        yield f"cannot be determined: {text}"


def _versions() -> Iterator[str]:
    from replicator.version import __version__

    folder = os.path.dirname(os.path.abspath(__file__))
    yield f"replicator {__version__}, in {folder}"
    yield f"Python {platform.python_version()}, {platform.platform()}"
    for name in _NEEDED:
        yield f"{name} {_version(name) or 'is not installed'}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed() -> Iterator[str]:
    for name in _OPTIONAL:
        yield f"{name}: {_version(name) or 'no'}"


def _devices() -> Iterator[str]:
    import tensorflow as tf

    yield f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    for device in tf.config.list_physical_devices():
        facts = tf.config.experimental.get_device_details(device)
        details = ", ".join(f"{name} {value}" for name, value in sorted(facts.items()))
        yield f"{device.name}{': ' if details else ''}{details}"
    build = tf.sysconfig.get_build_info()
    if build.get("is_cuda_build"):
        cuda, cudnn = build.get("cuda_version"), build.get("cudnn_version")
        yield f"TensorFlow was built for CUDA {cuda}, cuDNN {cudnn}"
    else:
        yield "TensorFlow was built without CUDA"


def _calibration() -> Iterator[str]:
    from replicator.costs import rates

    path = os.environ.get(rates.VARIABLE)
    yield f"from {path}" if path else "none: the default rates are used"
    calibration = rates.load(None)
    for kind in rates.KINDS:
        rate = calibration.of(kind)
        source = "measured" if kind in calibration.rates else "default"
        yield (
            f"{kind}, {source}: op {rate.op:.3g} s, message {rate.message:.3g} s; per "
            f"byte: link {rate.link:.3g} s, add {rate.add:.3g} s, "
            f"copy {rate.copy:.3g} s"
        )
    if calibration.links:
        yield f"{len(calibration.links)} links between hosts were measured"


def _environment() -> Iterator[str]:
    names = [
        name
        for name in sorted(os.environ)
        if name.startswith(_VARIABLES) and not name.startswith(_OTHERS)
    ]
    for name in names:
        secret = any(part in name.upper() for part in _SECRET)
        yield f"{name}={'(not shown)' if secret else os.environ[name]}"
    if not names:
        yield "no variable of TensorFlow or replicator is set"


_SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "Versions": _versions,
    "Devices": _devices,
    "Calibration": _calibration,
    "Optional packages": _installed,
    "Environment": _environment,
}


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse)
