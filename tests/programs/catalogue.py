# SPDX-License-Identifier: Apache-2.0
"""All programs: importing a file of this folder adds what is in it."""

from __future__ import annotations

from tests.programs import collectives, control_flow, layers, state, training, writes
from tests.programs.program import PROGRAMS as PROGRAMS

_FILES = (collectives, control_flow, layers, state, training, writes)
ALL = list(PROGRAMS.values())
