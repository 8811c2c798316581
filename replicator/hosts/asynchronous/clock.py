# SPDX-License-Identifier: Apache-2.0
"""Bounds how far programs may be ahead of each other, by a clock that each advances.

With a staleness of k, a program begins a step only if it then is at most k steps ahead
of the slowest. Programs that have ended or are lost delay no others.

Source: the stale synchronous parallel model (Ho et al. 2013, More effective distributed
ML via a stale synchronous parallel parameter server).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from replicator import errors
from replicator.hosts.asynchronous import board as boards
from replicator.hosts.asynchronous.board import LOST, STATES, STEPS, Board
from replicator.hosts.asynchronous.events import Events
from replicator.strategy.builder import Builder
from replicator.strategy.builders.ps import PS, PSLoadBalancing
from replicator.strategy.rules import Rules


class Clock:
    """Counts this program's steps, and makes them wait for the slowest program.

    Args:
        board: The table of the steps done by each program.
        names: The names of the programs, for messages.
        events: The log of this program.
        staleness: How many steps this program may be ahead; None for no bound.
    """

    def __init__(
        self,
        board: Board,
        names: tuple[str, ...],
        events: Events,
        staleness: int | None,
    ) -> None:
        self.staleness = staleness
        self._board, self._names, self._events = board, names, events

    @property
    def place(self) -> tuple[int, int]:
        """The number of this program, and the number of programs."""
        return self._board.program, self._board.count

    def counted(self, run: Callable[[], Any], steps: int) -> Callable[[], Any]:
        """Wraps a step so that it waits for the slowest program, and is counted.

        Args:
            run: Runs the step.
            steps: The number of steps that one call runs.

        Raises:
            ArgumentError: One call alone would exceed the staleness bound.
        """
        if self.staleness is not None and steps > self.staleness:
            raise errors.ArgumentError(
                f"steps_per_call={steps} is more than the staleness of "
                f"{self.staleness}: a single call would put this program further ahead "
                "of the others.",
                fix=f"pass steps_per_call={self.staleness} or less; or use "
                f"PS(staleness={steps}).",
            )

        def call() -> Any:
            self.begin(steps)
            result = run()
            self.done(steps)
            return result

        return call

    def refuse_graph(self) -> None:
        """Refuses to build a step into a function or graph, whose calls go uncounted.

        Raises:
            ContextError: There is a staleness bound.
        """
        if self.staleness is not None:
            raise errors.ContextError(
                "a step is built into a tf.function or a tf.Graph, where a staleness "
                f"of {self.staleness} cannot be enforced.",
                fix="call repl.run outside of tf.functions; or let programs continue "
                "without waiting, PS(sync=False).",
            )

    def begin(self, steps: int) -> None:
        """Waits until `steps` more steps may begin.

        Raises:
            HostLostError: The others have declared this program lost.
        """
        table = self._read()
        if self._is_early(table, steps):
            self._events.note("waits", **_facts(table))
            boards.wait(lambda: not self._is_early(self._read(), steps), math.inf)
            table = self._read()
        self._events.note("begins", **_facts(table))

    def done(self, steps: int) -> None:
        """Counts `steps` more steps as done."""
        table = self._read()
        total = int(table[STEPS, self._board.program]) + steps
        self._board.write(STEPS, total)
        self._events.note("done", total=total)

    def _is_early(self, table: np.ndarray, steps: int) -> bool:
        if self.staleness is None:
            return False
        own_steps = table[STEPS, self._board.program] + steps
        live_steps = table[STEPS][
            np.isin(table[STATES], (boards.ABSENT, boards.PRESENT))
        ]
        return bool(own_steps - live_steps.min(initial=own_steps) > self.staleness)

    def _read(self) -> np.ndarray:
        table = self._board.read()
        if table[STATES, self._board.program] == LOST:
            name = self._names[self._board.program]
            raise errors.HostLostError(
                errors.compose(
                    f"this program, {name}, was silent for longer than the heartbeat, "
                    "and the others have continued without it.",
                    [f"at {errors.user_line()}"],
                    "restart it: it continues with the variables as they are.",
                ),
                (name,),
            )
        return table


def _facts(table: np.ndarray) -> dict[str, Any]:
    return {"steps": table[STEPS].tolist(), "states": table[STATES].tolist()}


def staleness(strategy: Builder | None) -> int | None:
    """Returns how many steps programs may be apart; None if there is no bound.

    Args:
        strategy: The strategy of the Replicator.

    Raises:
        StrategyError: The strategy is for programs that one process builds.
    """
    if strategy is None:
        return None
    rules = strategy.rules if isinstance(strategy, Rules) else {"": strategy}
    bounds = []
    for builder in rules.values():
        is_asynchronous = isinstance(builder, PS) and (
            builder.staleness or not builder.sync
        )
        if type(builder) not in (PS, PSLoadBalancing) or not is_asynchronous:
            raise errors.StrategyError(
                f"{type(builder).__name__} cannot be used where programs train the "
                "same variables, each at its own speed.",
                fix="in asynchronous mode, pass PS(sync=False), or PS(staleness=k).",
            )
        assert isinstance(builder, PS)
        bounds.append(builder.staleness)
    return min(filter(None, bounds), default=None)
