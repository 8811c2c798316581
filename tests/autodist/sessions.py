# SPDX-License-Identifier: Apache-2.0
"""What a program of sessions is, and how many replicas, and which strategies, run it.

A program is one function in fetched.py, pulled.py or updated.py under the decorator
`program`. It builds a graph, runs it, and returns what it fetched:

    @program({"a sum": tf.reduce_sum, "rows": tf.square})
    def fetched(begin, compute):
        x = v1.placeholder(tf.float32, [None])
        return begin().run(compute(x), {x: [1.0, 2.0, 6.0]})

`begin` returns a session in which variables have values, and tables begin. What plain
TensorFlow returns on one device is what all replicas must return.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicator import strategy

Run = Callable[..., Any]
PARTS, ONE_PLACE = strategy.PartitionedPS(), strategy.PS()
EACH = ("mirrored", ONE_PLACE, PARTS)
_IN_TURN = ("mirrored", "sharded", PARTS, None, ONE_PLACE)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of sessions.

    Attributes:
        run: The program, a function of `begin`.
        strategies: Those that run it, with 2 and 3 replicas in turn.
        expected: What it returns; None: what it does in plain TensorFlow.
    """

    run: Run
    strategies: Sequence[Any]
    expected: Any = None

    def ways(self) -> list[tuple[int, Any]]:
        """Returns the numbers of replicas, and the strategies, that run it."""
        turns = [(2 + k % 2, one) for k, one in enumerate(self.strategies)]
        return [(1, "mirrored"), *turns]


PROGRAMS: dict[str, Program] = {}


def program(
    cases: Mapping[Any, Any] | None = None,
    strategies: Sequence[Any] = (),
    expected: Any = None,
) -> Callable[[Run], Run]:
    """Adds a program to the catalogue.

    Args:
        cases: What it is also given, by names: a program for each.
        strategies: Those that run it; by default two, each program's in turn.
        expected: What it returns; None: what it does in plain TensorFlow.
    """

    def register(run: Run) -> Run:
        for name, case in (cases or {"": None}).items():
            first = len(PROGRAMS)
            turns = [_IN_TURN[(first + k) % len(_IN_TURN)] for k in (0, 1)]
            title = f"{run.__name__}, {name}" if cases else run.__name__
            own = functools.partial(run, case=case) if cases else run
            assert title not in PROGRAMS, title
            PROGRAMS[title] = Program(own, strategies or turns, expected)
        return run

    return register
