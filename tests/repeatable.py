# SPDX-License-Identifier: Apache-2.0
"""Makes Hypothesis draw the same inputs each time: a commit passes or it does not.

`--hypothesis-profile=default` draws anew each time.
"""

from __future__ import annotations

import hypothesis
from hypothesis.internal.conjecture import providers


def load() -> None:
    """Loads the profile, and keeps what is drawn apart from what was imported.

    One draw in twenty or so is of constants that Hypothesis finds in the source of the
    modules that are imported at that moment: in a suite, of whatever tests the same
    process has run before. No setting turns that off.
    """
    none = providers.Constants()
    providers._get_local_constants = lambda: none
    hypothesis.settings.register_profile("repeatable", derandomize=True)
    hypothesis.settings.load_profile("repeatable")
