# SPDX-License-Identifier: Apache-2.0
"""Random tests, each with random options of Replicator.

Options do not change what a Replicator computes, so any test may run with any.
"""

from __future__ import annotations

import collections
import datetime
import itertools
import random
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

# The values of each option; the first is the default.
CHOICES = {
    "variables": ("auto", "mirrored", "sharded"),
    "build": ("trace", "clone"),
    "algorithm": ("None", "hub", "shuffled", "tree", "ring"),
    "fusion": ("True", "False"),
    "factors": ("True", "False"),
    "kernels": ("True", "False"),
    "check": ("False", "True"),
    # Several steps by tests/helpers.py run in one call.
    "steps_per_call": ("False", "True"),
}
# Programs and measurements, which do not see these defaults: processes that a test
# starts have Replicator's own.
_LEFT_OUT = (
    *("tests/benchmarks/", "tests/examples/", "tests/calibrate/", "tests/clients/"),
    *("tests/hosts/", "tests/between/", "tests/cluster/", "tests/launch/"),
    *("tests/serve/", "tests/inputs/test_hosts.py", "tests/_tf/test_cluster.py"),
    *("tests/test_sampling.py", "tests/test_v1_behavior.py", "tests/programs/"),
)
# Of these, nothing runs with these defaults, not even in long runs.
_APART = (
    *("tests/benchmarks/", "tests/launch/", "tests/serve/", "tests/tools/"),
    *("tests/hosts/asynchronous/test_training.py", "tests/between/test_faults.py"),
    *("tests/between/test_restarts.py", "tests/cluster/test_faults.py"),
    *("tests/docs/", "tests/typed/", "tests/programs/"),  # all options are its own
    "tests/bad_inputs/test_bad_inputs.py::test_two_thousand_are_right",
)


def concerned(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Drops tests that would be the same with any options of Replicator."""
    return [item for item in items if not item.nodeid.startswith(_APART)]


def in_turn(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns the product of all axes but the last, whose values come in turn.

    Behind two or more axes that are at least as long, each two values of any two axes
    are in a case.

    Args:
        *axes: Values, e.g. of a test's parameters.
    """
    *others, last = axes
    cases = []
    for numbered in itertools.product(*map(enumerate, others)):
        numbers, values = zip(*numbered, strict=True)
        cases.append((*values, last[sum(numbers) % len(last)]))
    return cases


def left_to_long_runs(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Drops most cases of batteries that are too large for each run of the suite.

    Of a test that is marked `battery(n)`, every n-th case remains, at least one: always
    the same ones, chosen by their names, so that they are of all kinds.
    """
    cases: dict[tuple[str, int], list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("battery"):
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    remaining = []
    for (_, count), own in cases.items():
        own.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        remaining += own[-(-len(own) // count) :]
    return remaining


def part(asked: str, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns each n-th of the tests, chosen by their names.

    Args:
        asked: "K/N", for part K of N; the first is part 0.
        items: All tests.
    """
    k, n = map(int, asked.split("/"))
    return [item for item in items if zlib.crc32(item.nodeid.encode()) % n == k]


def draw(asked: str, items: Sequence[pytest.Item]) -> dict[pytest.Item, list[str]]:
    """Returns a sample of tests with their options, determined by the seed.

    Args:
        asked: "COUNT" or "COUNT:SEED".
        items: All tests.
    """
    count, _, seed = seeded(asked).partition(":")
    dice = random.Random(seed)
    able = sorted(filter(_is_able, items), key=lambda item: item.nodeid)
    chosen = dice.sample(able, min(int(count), len(able)))
    return dict(zip(chosen, options(dice, len(chosen)), strict=True))


def seeded(asked: str) -> str:
    """Returns "COUNT:SEED"; the seed defaults to the date."""
    return asked if ":" in asked else f"{asked}:{datetime.date.today()}"


def options(dice: random.Random, count: int) -> list[list[str]]:
    """Returns one or two options for each of `count` tests, as "NAME=VALUE".

    All values other than defaults come first about equally often.
    """
    values = [(name, value) for name in sorted(CHOICES) for value in CHOICES[name][1:]]
    dice.shuffle(values)
    result = []
    for first in itertools.islice(itertools.cycle(values), count):
        others = [other for other in values if other[0] != first[0]]
        chosen = [first, *dice.sample(others, dice.choice((0, 1)))]
        result.append([f"{name}={value}" for name, value in chosen])
    return result


def _is_able(item: pytest.Item) -> bool:
    """Whether a test accepts options, and is fast."""
    return not (item.get_closest_marker("slow") or item.nodeid.startswith(_LEFT_OUT))
