# SPDX-License-Identifier: Apache-2.0
"""Variables that all programs of asynchronous mode share: on servers, by name.

Every program makes the same variables in the same order. The first one gives them
their initial values; the others find them by their numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from replicator import _tf, errors
from replicator.asynchronous import board as boards
from replicator.asynchronous.board import ABSENT, PRESENT, STATES, Board
from replicator.variables.placement import Placement
from replicator.variables.seeds import Seed


class Store:
    """What this program shares with the others.

    Args:
        board: What the programs tell one another.
        names: Of the programs, for messages.
        devices: Of the servers; a variable goes to that with the fewest bytes.
        limit: Seconds to wait for the first program to make a variable.
    """

    def __init__(
        self,
        board: Board,
        names: Sequence[str],
        devices: Sequence[str],
        limit: float,
    ) -> None:
        self._board, self._names, self._limit = board, names, limit
        self._bytes = dict.fromkeys(devices, 0)
        self._numbers = itertools.count()

    def takes(self, placement: Placement, local: tf.Variable) -> bool:
        """Whether all programs share a variable: not metrics, nor what draws numbers.

        Args:
            placement: Where it would be in one program alone.
            local: It, as it would be there.
        """
        return not placement.differs and Seed.of(local) is None

    def share(self, local: tf.Variable) -> tf.Variable:
        """Returns the variable of all programs that is in the place of a local one.

        Args:
            local: Has the initial value, and what is known of the variable.

        Raises:
            MismatchError: The first program makes another variable, or none.
        """
        number = next(self._numbers)
        size = (local.shape.num_elements() or 0) * local.dtype.size
        device = min(self._bytes, key=self._bytes.__getitem__)
        self._bytes[device] += size
        name = f"replicator/{number}"
        shared = _tf.shared_variable(name, local.dtype, local.shape, device, local)
        facts = f"{local.name}: {local.dtype.name}{local.shape}"
        made = _tf.shared_variable(f"{name}/made", tf.string, [], device)
        if self._board.own == 0:
            if not _tf.is_initialized(made):
                shared.assign(local.read_value())
                made.assign(facts)
            return shared
        self._wait_for(made, facts)
        told = made.numpy().decode()
        if told != facts:
            raise self._mismatch(f"{self._names[0]} makes {told}", facts)
        return shared

    def table(self, name: str, size: int) -> tf.Variable:
        """Returns numbers that all programs share, which are 0 at first.

        Args:
            name: What they are called.
            size: How many there are.
        """
        device = next(iter(self._bytes))
        shared = _tf.shared_variable(f"replicator/{name}", tf.int64, [size], device)
        if self._board.own == 0 and not _tf.is_initialized(shared):
            shared.assign(np.zeros([size], np.int64))
        elif not boards.wait(lambda: _tf.is_initialized(shared), self._limit):
            raise self._mismatch(f"{self._names[0]} has no {name}", f"a {name}")
        return shared

    def _wait_for(self, made: tf.Variable, facts: str) -> None:
        """Waits until the first program has made a variable."""

        def settled() -> bool:
            first = self._board.read()[STATES, 0]
            return _tf.is_initialized(made) or first not in (ABSENT, PRESENT)

        boards.wait(settled, self._limit)
        if not _tf.is_initialized(made):
            raise self._mismatch(f"{self._names[0]} makes none", facts)

    def _mismatch(self, first: str, facts: str) -> errors.MismatchError:
        own = self._names[self._board.own]
        return errors.MismatchError(
            errors.compose(
                "the programs create different variables.",
                [first, f"{own} makes {facts}, at {errors.user_line()}"],
                "let all programs create the same variables in the same order.",
            )
        )
