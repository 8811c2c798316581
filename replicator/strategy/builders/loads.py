# SPDX-License-Identifier: Apache-2.0
"""Balances variables over devices by their bytes."""

from __future__ import annotations

from collections.abc import Sequence


class Loads:
    """Assigns variables to devices, each to the one with the fewest bytes so far."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._nbytes = dict.fromkeys(devices, 0)

    def least(self, nbytes: int) -> str:
        """Adds to the least loaded device, the first of several, and returns it.

        Args:
            nbytes: The bytes to add.
        """
        device = self.lowest()
        self.add(device, nbytes)
        return device

    def lowest(self) -> str:
        """Returns the least loaded device, the first of several."""
        return min(self._nbytes, key=self._nbytes.__getitem__)

    def add(self, device: str, nbytes: int) -> None:
        """Adds to the load of a device."""
        self._nbytes[device] += nbytes
