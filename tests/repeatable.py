# SPDX-License-Identifier: Apache-2.0
"""Makes Hypothesis draw the same inputs each time: a commit passes or it does not.

`--hypothesis-profile=default` draws new ones each time.

Hypothesis also repeats what it drew elsewhere in an input from a choice between equal
things. Whether lambdas and other objects that equal only themselves are such depends on
where in memory they are: `choice` draws positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers


def load() -> None:
    """Loads the profile, and makes draws independent of imports.

    About one draw in twenty is a constant that Hypothesis finds in the source of the
    modules imported at that moment: in a suite, of whatever tests the same process has
    run before. No setting turns that off.
    """
    none = providers.Constants()
    providers._get_local_constants = lambda: none
    hypothesis.settings.register_profile("repeatable", derandomize=True)
    hypothesis.settings.load_profile("repeatable")


def choice(draw: Callable[[Any], Any], among: Iterable[Any]) -> Any:
    """Draws one of several things, whatever they are.

    Args:
        draw: Draws from a strategy.
        among: The things.
    """
    things = list(among)
    return things[draw(st.sampled_from(range(len(things))))]
