# SPDX-License-Identifier: Apache-2.0
"""A host knows the addresses from which it connects to the others."""

from __future__ import annotations

import pytest

from replicator.launch import routes


def test_sources_are_the_addresses_of_the_ways() -> None:
    assert routes.sources("127.0.0.1", []) == ["127.0.0.1"]
    # By its own way, 127.0.0.1 reaches the others; they see that, too.
    assert routes.sources("127.0.0.2", ["127.0.0.3"]) == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.parametrize(
    "own", ["192.0.2.77", "2001:db8::77", "no number"], ids=["IPv4", "IPv6", "name"]
)
def test_a_translated_address_has_none(own: str) -> None:
    assert routes.sources(own, ["127.0.0.1"]) is None
