# SPDX-License-Identifier: Apache-2.0
"""Shares variables among the programs of asynchronous mode: on servers, by name.

Every program creates the same variables in the same order. The first program sets
their initial values; the others find them by their numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from replicator import errors
from replicator._tf import variables
from replicator.hosts.asynchronous import board as boards
from replicator.hosts.asynchronous.board import ABSENT, PRESENT, STATES, Board
from replicator.variables.placement import Placement
from replicator.variables.seeds import Seed


class Store:
    """The variables that this program shares with the others.

    Args:
        board: The table that the programs share.
        names: The names of the programs, for messages.
        devices: The servers' devices; a variable goes to the one with the fewest bytes.
        limit: How many seconds to wait for the first program to create a variable.
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
        """Whether all programs share a variable: all but metrics and random seeds.

        Args:
            placement: The variable's placement in a single program.
            local: The variable in a single program.
        """
        return not placement.differs and Seed.of(local) is None

    def share(self, local: tf.Variable) -> tf.Variable:
        """Returns the shared variable that replaces a local one.

        Args:
            local: The local variable; gives the initial value, dtype and shape.

        Raises:
            MismatchError: The first program creates a different variable, or none.
        """
        number = next(self._numbers)
        size = (local.shape.num_elements() or 0) * local.dtype.size
        device = min(self._bytes, key=self._bytes.__getitem__)
        self._bytes[device] += size
        name = f"replicator/{number}"
        shared = variables.shared_variable(
            name, local.dtype, local.shape, device, local
        )
        facts = f"{local.name}: {local.dtype.name}{local.shape}"
        marker = variables.shared_variable(f"{name}/made", tf.string, [], device)
        if self._board.program == 0:
            if not variables.is_initialized(marker):
                shared.assign(local.read_value())
                marker.assign(facts)
            return shared
        self._wait_for(marker, facts)
        first_facts = marker.numpy().decode()
        if first_facts != facts:
            raise self._mismatch(f"{self._names[0]} creates {first_facts}", facts)
        return shared

    def table(self, name: str, size: int) -> tf.Variable:
        """Returns a shared int64 vector of initial value 0.

        Args:
            name: The name of the vector.
            size: Its length.
        """
        device = next(iter(self._bytes))
        shared = variables.shared_variable(
            f"replicator/{name}", tf.int64, [size], device
        )
        if self._board.program == 0 and not variables.is_initialized(shared):
            shared.assign(np.zeros([size], np.int64))
        elif not boards.wait(lambda: variables.is_initialized(shared), self._limit):
            raise self._mismatch(f"{self._names[0]} has no {name}", f"a {name}")
        return shared

    def _wait_for(self, marker: tf.Variable, facts: str) -> None:
        """Waits until the first program has created a variable.

        Args:
            marker: Set by the first program once the variable has its initial value.
            facts: Describes this program's variable, for messages.
        """

        def settled() -> bool:
            first = self._board.read()[STATES, 0]
            return variables.is_initialized(marker) or first not in (ABSENT, PRESENT)

        boards.wait(settled, self._limit)
        if not variables.is_initialized(marker):
            raise self._mismatch(f"{self._names[0]} creates none", facts)

    def _mismatch(self, first: str, facts: str) -> errors.MismatchError:
        own_name = self._names[self._board.program]
        return errors.MismatchError(
            "the programs create different variables.",
            [first, f"{own_name} creates {facts}, at {errors.user_line()}"],
            "create the same variables in all programs, in the same order.",
        )
