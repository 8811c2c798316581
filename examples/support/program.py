# SPDX-License-Identifier: Apache-2.0
"""An example as a command: its flags, and one-line errors."""

from __future__ import annotations

import functools
import io
import math
import pathlib
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from support import environment

import tensorflow as tf
from absl import app, flags, logging
from tqdm import tqdm

import replicator

MOST_STEPS = 1_000_000  # and epochs
MOST_COUNT = 2**31 - 1  # TensorFlow counts with int32 in places
MOST_CHARACTERS = 500  # of an error
FLAGS = flags.FLAGS
flags.disclaim_key_flags()  # flags defined here count as the calling example's


class UsageError(Exception):
    """The flags request something impossible."""


class Interrupted(Exception):
    """A signal has stopped the program.

    Args:
        signum: The signal.
        text: The line to print.
    """

    def __init__(self, signum: int, text: str) -> None:
        super().__init__(text)
        self.signum = signum


# --- Flags ----------------------------------------------------------------------------


def define_flags(
    output_dir: str | None = None,
    *,
    devices: Sequence[str] | None = ("CPU:0", "CPU:1"),
    epochs: int | None = None,
    steps: int | None = None,
    seed: str = "Seed of the initial weights and the order of the examples.",
    resume: bool = True,
) -> None:
    """Defines the flags that most examples have.

    Args:
        output_dir: The default of --output_dir; None omits the flag.
        devices: The default of --devices; None omits the flag.
        epochs: The default of --epochs; None omits the flag.
        steps: The default of --steps; None omits the flag.
        seed: What --seed decides.
        resume: Whether there is --resume, beside --output_dir.
    """
    if devices is not None:
        flags.DEFINE_list("devices", list(devices), "One device per replica.")
    if epochs is not None:
        help_ = "Passes over the training examples."
        flags.DEFINE_integer("epochs", epochs, help_, 1, MOST_STEPS)
    if steps is not None:
        flags.DEFINE_integer("steps", steps, "Steps of training.", 1, MOST_STEPS)
    flags.DEFINE_integer("seed", 1, seed, 0, 2**31 - 1)
    if output_dir is not None:
        flags.DEFINE_string("output_dir", output_dir, "Where the results go.")
        flags.register_validator("output_dir", bool, "must name a folder")
    if output_dir is not None and resume:
        help_ = (
            "Continue from the checkpoint in --output_dir instead of overwriting it."
        )
        flags.DEFINE_bool("resume", False, help_)


def define_positive(name: str, default: float, help_: str) -> None:
    """Defines a flag that takes positive, finite numbers."""
    flags.DEFINE_float(name, default, help_)
    flags.register_validator(
        name, lambda value: 0 < value < math.inf, "must be a positive number"
    )


def define_between(
    name: str, default: float, help_: str, least: float, most: float
) -> None:
    """Defines a flag for numbers within bounds; absl's own would accept NaN, too."""
    flags.DEFINE_float(name, default, help_, least, most)
    flags.register_validator(name, math.isfinite, "must be a number")


def define_count(name: str, default: int, help_: str, least: int = 1) -> None:
    """Defines a flag for integers from a minimum on, by default 1.

    Values that overflow in TensorFlow are usage errors, too.
    """
    flags.DEFINE_integer(name, default, help_, least, MOST_COUNT)


def settings(*names: str) -> dict[str, Any]:
    """Returns the values of flags, by their names."""
    return {name: FLAGS[name].value for name in names}


def check_batch_size(
    flag: str, num_replicas: int, examples: int, what: str = "training examples"
) -> None:
    """Raises an error unless the replicas divide a batch, and it can be filled.

    Args:
        flag: The name of the flag for the global batch size.
        num_replicas: How many share it.
        examples: The number of training examples.
        what: The noun for them in errors.

    Raises:
        UsageError: There are fewer examples than one batch holds.
        replicator.InputError: The replicas do not divide the batch.
    """
    size: Any = FLAGS[flag].value
    context = replicator.InputContext(0, num_replicas, 0, num_replicas)
    context.per_replica_batch_size(size)
    if size > examples:
        raise UsageError(f"--{flag}={size} is more than the {examples} {what}")


def output_folder() -> pathlib.Path:
    """Returns the folder of --output_dir, made if needed.

    Raises:
        UsageError: It is not writable.
    """
    name = FLAGS.output_dir
    try:
        path = pathlib.Path(name)
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise UsageError(f"--output_dir={name} is not writable: {error}") from error
    return path


# --- Errors ---------------------------------------------------------------------------


def explain(error: object, status: int = 2) -> int:
    """Prints the error in one line; returns the exit status for it."""
    _say(f"{program()}: error: {one_line(error)}")
    return status


def warn(text: str) -> None:
    """Prints a warning in one line."""
    _say(f"{program()}: warning: {one_line(text)}")


def _say(line: str) -> None:
    """Prints to standard error, on a new line if there is a progress bar."""
    tqdm.write(line, file=sys.stderr)


def program() -> str:
    """Returns the name of the program's file."""
    return pathlib.Path(sys.argv[0]).name


def one_line(text: object) -> str:
    """Returns a text in one line of limited length; keeps an error's suggested fix."""
    line = " ".join(str(text).split())
    if len(line) > MOST_CHARACTERS and isinstance(text, replicator.ReplicatorError):
        what, *rest = str(text).splitlines()
        line = " ".join([what, *(x for x in rest if x.lstrip().startswith("Fix: "))])
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]}..."


# --- The program ----------------------------------------------------------------------


def start(main: Callable[[], str | None]) -> None:
    """Runs a program to its end, with the flags of the command line; does not return.

    Args:
        main: Does what the flags say; returns the last line to print, if any.
    """
    app.run(functools.partial(_finish, main), flags_parser=_parse_flags)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses the command line; an error in it ends the program, with one line."""
    try:
        extra = FLAGS(argv)[1:]
    except flags.Error as error:
        sys.exit(explain(error))
    if extra:
        sys.exit(explain(f"unexpected argument {extra[0]!r}"))
    return []


def _finish(main: Callable[[], str | None], argv: Sequence[str]) -> int:
    """Calls main, reports errors in one line, and returns the exit status."""
    del argv  # _parse_flags has checked it
    environment.raise_again()
    logging.set_verbosity(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a folder may have any name
        sys.stdout.reconfigure(errors="backslashreplace")
    stopped = "stopped, continue with --resume: " if "resume" in FLAGS else ""
    try:
        last = main()
    except replicator.HostLostError as error:
        return explain(f"{stopped}{one_line(error)}", 1)
    except (UsageError, replicator.ReplicatorError) as error:
        return explain(error)
    except Interrupted as error:
        print(error)
        return 128 + error.signum  # the shells' exit status for it
    except (OSError, tf.errors.OpError) as error:  # a full disk, for example
        return explain(f"{stopped}{error}", 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if last is not None:
        print(last)
    return 0
