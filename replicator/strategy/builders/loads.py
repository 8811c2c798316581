# SPDX-License-Identifier: Apache-2.0
"""How much each of several devices holds."""

from __future__ import annotations

from collections.abc import Sequence


class Loads:
    """Deals variables to devices, each to the one that has the fewest bytes so far."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._nbytes = dict.fromkeys(devices, 0)

    def least(self, nbytes: int) -> str:
        """Returns the device with the least load, the first of several, and adds to it.

        Args:
            nbytes: How much it gets.
        """
        device = self.lowest()
        self.add(device, nbytes)
        return device

    def lowest(self) -> str:
        """Returns the device with the least load, the first of several."""
        return min(self._nbytes, key=self._nbytes.__getitem__)

    def add(self, device: str, nbytes: int) -> None:
        """Adds to the load of a device."""
        self._nbytes[device] += nbytes
