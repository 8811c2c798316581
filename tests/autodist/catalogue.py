# SPDX-License-Identifier: Apache-2.0
"""All programs of sessions, and of functions, by their names."""

from tests.autodist import (
    called,
    differentiated,
    fetched,
    functions,
    pulled,
    sessions,
    updated,
)

FILES = (fetched, pulled, updated, differentiated, called)  # which add to the tables
SESSIONS, FUNCTIONS = sessions.PROGRAMS, functions.PROGRAMS
