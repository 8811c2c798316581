# SPDX-License-Identifier: Apache-2.0
"""Makes Hypothesis draw the same inputs each time: a commit passes or it does not.

`--hypothesis-profile=default` draws new ones each time.
"""

from __future__ import annotations

import hypothesis
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
