# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of this folder."""

from __future__ import annotations

import uuid

import pytest

from replicator._tf import variables


@pytest.fixture
def names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the test share variables under unique names."""
    make, mark = variables.shared_variable, uuid.uuid4().hex
    monkeypatch.setattr(
        variables, "shared_variable", lambda name, *rest: make(f"{mark}/{name}", *rest)
    )
