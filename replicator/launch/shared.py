# SPDX-License-Identifier: Apache-2.0
"""What the launcher and the program tell each other while both run: two files.

One holds the description of the cluster, as it is now; the program makes the other if
it goes on by itself after a server was lost (`replicator.resilient`).
"""

from __future__ import annotations

import os
import pathlib

_CLUSTER, _COPES = "cluster.json", "resilient"


class Shared:
    """A folder with both.

    Args:
        folder: An empty one.

    Attributes:
        path: Where the description is.
    """

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, _CLUSTER)
        self._copes = pathlib.Path(folder, _COPES)

    def describe(self, cluster: str) -> None:
        """Writes the description; whoever reads meanwhile finds the old one."""
        new = pathlib.Path(f"{self.path}.new")
        new.write_text(cluster)
        new.rename(self.path)

    @property
    def copes(self) -> bool:
        """Whether the program goes on by itself when a server is lost."""
        return self._copes.exists()
