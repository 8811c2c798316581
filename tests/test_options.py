# SPDX-License-Identifier: Apache-2.0
"""The options of a Replicator, which are checked once, by name."""

from __future__ import annotations

import dataclasses

import pytest

import replicator
from replicator.costs import cost
from replicator.options import Options
from tests.helpers import make

NAMES = [f.name for f in dataclasses.fields(Options) if f.name != "calibration"]


@pytest.mark.parametrize("name", [*NAMES, "input_mode"])
def test_a_value_that_an_option_cannot_have(name: str) -> None:
    with pytest.raises(replicator.errors.ArgumentError) as caught:
        make(2, **{name: "no such thing"})
    message = str(caught.value)
    assert f"{name}='no such thing'" in message
    assert f"Fix: {name} is one of" in message
    assert "tests/helpers.py" in message


def test_what_the_lowerings_ask_for() -> None:
    chosen = Options(algorithm="hub", fusion=False, factors=False)
    policy = cost.Policy("hub", False, False, chosen.calibration)
    assert chosen.policy == policy
