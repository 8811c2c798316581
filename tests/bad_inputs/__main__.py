# SPDX-License-Identifier: Apache-2.0
"""Runs bad inputs: `python -m tests.bad_inputs --count=2000 --seed=1`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import app, flags

from tests.bad_inputs import workers

_COUNT = flags.DEFINE_integer("count", 2000, "How many cases.", 1)
_SEED = flags.DEFINE_integer("seed", 1, "Which cases.")
_ONLY = flags.DEFINE_string("only", "", "Only cases with this in their names.")
_ALL = flags.DEFINE_bool("all", False, "Whether to print good ones too.")


def main(argv: Sequence[str]) -> int:
    """Runs the cases, prints the bad ones and the number of each kind."""
    del argv

    def tell(name: str, verdict: str) -> None:
        if _ALL.value or verdict.startswith("BAD"):
            print(f"{name}\n    {verdict}", flush=True)

    verdicts = workers.run(_COUNT.value, _SEED.value, _ONLY.value, tell)
    print(f"{len(verdicts)} cases: {workers.summary(verdicts)}")
    return any(verdict.startswith("BAD") for verdict in verdicts.values())


if __name__ == "__main__":
    sys.exit(app.run(main))
