# SPDX-License-Identifier: Apache-2.0
"""What the lines of a hostfile say, as mpirun and horovodrun write them. Pure.

The launcher reads them, and so does `replicator.connect` (cluster/hostfile.py), for
which a number behind a host's name is a port and not one of replicas.
"""

from __future__ import annotations

import dataclasses
import re

MOST_SLOTS = 4096
_SLOTS, _MOST = "slots", "max_slots"


class HostfileError(ValueError):
    """A line is not as it should be.

    Args:
        number: The line's, from 1 on.
        text: What is wrong with it.
    """

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


@dataclasses.dataclass(frozen=True)
class Line:
    """A line that names a host.

    Attributes:
        number: The line's, from 1 on.
        host: Its first word.
        slots: How many replicas the host has, if the line says so.
        most: How many it has at most, if the line says so.
    """

    number: int
    host: str
    slots: int | None
    most: int | None


def lines(text: str) -> list[Line]:
    """Returns the lines of a hostfile that name hosts.

    Args:
        text: The file: on each line a host, perhaps with " slots=2" and " max_slots=4";
            what follows # is a comment.

    Raises:
        HostfileError: A line is not of this form.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            limits = _limits(words[1:], number)
            found.append(Line(number, words[0], limits.get(_SLOTS), limits.get(_MOST)))
    return found


def count(text: str) -> int:
    """Returns a number of replicas.

    Raises:
        ValueError: It is none.
    """
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MOST_SLOTS:
        raise ValueError(f"{text!r} is no number of replicas from 1 to {MOST_SLOTS}")
    return int(text)


def _limits(words: list[str], number: int) -> dict[str, int]:
    """Returns what the words behind a host say."""
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
