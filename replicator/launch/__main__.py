# SPDX-License-Identifier: Apache-2.0
"""Starts servers on all hosts and a program that uses them, or a program per host.

`python -m replicator.launch train.py` does the former, --mode=between the latter.
`python -m replicator.launch --help` lists the flags.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from replicator.launch import flags, hosts, run


def main(argv: Sequence[str]) -> int:
    """Runs the job that the arguments describe; returns the exit status."""
    try:
        job = flags.parse(argv, os.environ, hosts.own_names())
        return asyncio.run(run.launch(job))
    except hosts.LaunchError as error:
        text = " ".join(str(error).split())
        print(f"replicator.launch: {text}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
