# SPDX-License-Identifier: Apache-2.0
"""Starts servers on hosts, and a program, or the program on all hosts.

`python -m replicator.launch train.py` does the first, with --mode=between the second.
`python -m replicator.launch --help` lists the flags.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from replicator.launch import flags, hosts, run


def main(argv: Sequence[str]) -> int:
    """Runs what the arguments ask for; returns the exit status."""
    try:
        job = flags.parse(argv, os.environ, hosts.own_names())
        return asyncio.run(run.launch(job))
    except hosts.LaunchError as error:
        text = " ".join(str(error).split())
        print(f"replicator.launch: {text}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
