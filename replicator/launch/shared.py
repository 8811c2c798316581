# SPDX-License-Identifier: Apache-2.0
"""Two files by which the launcher and the running program inform each other.

One holds the current description of the cluster. The program creates the other if it
can go on after losing a server (`replicator.resilient`).
"""

from __future__ import annotations

import os
import pathlib

_CLUSTER, _COPES = "cluster.json", "resilient"


class Shared:
    """A folder with both files.

    Args:
        folder: An empty folder.

    Attributes:
        path: The path of the description.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, _CLUSTER)
        self._copes = pathlib.Path(folder, _COPES)

    def describe(self, cluster: str) -> None:
        """Replaces the description atomically."""
        path = pathlib.Path(f"{self.path}.new")
        path.write_text(cluster)
        path.rename(self.path)

    @property
    def copes(self) -> bool:
        """Whether the program can go on after losing a server."""
        return self._copes.exists()
