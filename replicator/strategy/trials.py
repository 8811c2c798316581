# SPDX-License-Identifier: Apache-2.0
"""Trial: the result of measuring a strategy on real steps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of measuring a strategy on real steps.

    Example:
        >>> trial = replicator.strategy.Trial("Auto()", "1f", 0.001, 0.004)
        >>> print(trial)
        Auto(): 4 ms a step, of which 1 ms are predicted for variables

    Attributes:
        builder: The builder of the strategy.
        strategy: The strategy's id.
        predicted: The predicted seconds per step for variables: sending gradients,
            updates and reads. The model's own computation is not included.
        measured: The median seconds per step; None if it could not run.
        problem: Why it could not run; "" if it could.
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
