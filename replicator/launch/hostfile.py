# SPDX-License-Identifier: Apache-2.0
"""Parses the lines of hostfiles, in the format of mpirun and horovodrun. Pure.

The launcher uses it, and so does `replicator.connect` (cluster/hostfile.py), which
takes a number after a host's name for a port and not for a number of replicas.
"""

from __future__ import annotations

import dataclasses
import re

MOST_SLOTS = 4096
_SLOTS, _MOST = "slots", "max_slots"


class HostfileError(ValueError):
    """A line of a hostfile is malformed.

    Args:
        number: The number of the line, from 1.
        text: What is wrong with it.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a hostfile that names a host.

    Attributes:
        number: The number of the line, from 1.
        host: Its first word.
        slots: The number of the host's replicas, or None.
        most: The maximum number of the host's replicas, or None.
    """

    number: int
    host: str
    slots: int | None
    most: int | None


def lines(text: str) -> list[Line]:
    """Returns the lines of a hostfile that name hosts.

    Args:
        text: The file's text: on each line a host with optional " slots=2" and
            " max_slots=4"; a "#" begins a comment.

    Raises:
        HostfileError: A line is not of this form.
    """
    host_lines = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            limits = _limits(words[1:], number)
            host_lines.append(
                Line(number, words[0], limits.get(_SLOTS), limits.get(_MOST))
            )
    return host_lines


def count(text: str) -> int:
    """Parses a number of replicas.

    Raises:
        ValueError: The text is no such number.
    """
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MOST_SLOTS:
        raise ValueError(f"{text!r} is not a number of replicas from 1 to {MOST_SLOTS}")
    return int(text)


def _limits(words: list[str], number: int) -> dict[str, int]:
    """Parses the words after a host, "slots=2" and "max_slots=4"."""
    limits: dict[str, int] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if not equals or key not in (_SLOTS, _MOST):
            text = f"unknown word {word!r}; expected slots=NUMBER"
            raise HostfileError(number, text)
        try:
            limits[key] = count(value)
        except ValueError as error:
            raise HostfileError(number, f"{word}: {error}") from None
    return limits
