# SPDX-License-Identifier: Apache-2.0
"""Trial: what came of measuring a strategy on real steps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Trial:
    """What came of measuring a strategy on real steps.

    Example:
        >>> trial = replicator.strategy.Trial("Auto()", "1f", 0.001, 0.004)
        >>> print(trial)
        Auto(): 4 ms a step, of which 1 ms are predicted for variables

    Attributes:
        builder: What made the strategy.
        strategy: Its id.
        predicted: How many seconds of a step its variables were predicted to take:
            their gradients' ways, their updates and their readers. What the model
            computes is not part of that.
        measured: How many seconds a step took, the median; None if it could not be run.
        problem: Why it could not; "" if it could.
    """

    builder: str
    strategy: str
    predicted: float
    measured: float | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.measured is None:
            return f"{self.builder}: not measured: {self.problem}"
        return (
            f"{self.builder}: {self.measured * 1e3:.3g} ms a step, of which "
            f"{self.predicted * 1e3:.3g} ms are predicted for variables"
        )
