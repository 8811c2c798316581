# SPDX-License-Identifier: Apache-2.0
"""All programs of fit compute Keras' numbers on replicas."""

from __future__ import annotations

import pytest

from tests.keras import batches, fits, losses, settings, steps, worlds

_FILES = (batches, settings, losses, steps)  # which add to the catalogue


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            one,
            id=name.replace(", ", "-").replace(" ", "_"),
            marks=pytest.mark.slow if one.is_slow else (),
        )
        for name, one in fits.PROGRAMS.items()
    ],
)
def test_program(program: fits.Program) -> None:
    worlds.check(program.run, program.replicas, program.tolerance, **program.options)
