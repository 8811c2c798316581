# SPDX-License-Identifier: Apache-2.0
"""Addresses are parsed as they are formatted; invalid ones are refused."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicator.cluster import addresses

SPLIT = {
    "host-a": ("host-a", None),
    "host-a:41": ("host-a", 41),
    "grpc://10.0.0.1:8888": ("10.0.0.1", 8888),
    "[::1]:5": ("::1", 5),
    "[::1]": ("::1", None),
    "fe80::1": ("fe80::1", None),
    "host:0": ("host", 0),
    "host:65535": ("host", 65535),
}


@pytest.mark.parametrize("text", SPLIT)
def test_split(text):
    assert addresses.split(text) == SPLIT[text]


@pytest.mark.parametrize(
    "text",
    ["", ":80", "a b", "a/b:1", "[::1", "[::1]5", "[a]:5", "host:", "host:-1", "a:b"]
    + ["host:65536", "host:" + "9" * 5000, "host:٣", "1:2:3", "a,b", "u@h:1", "a\n:1"]
    + ["a" * 250, "a" * 64 + ".b:1", "a..b:1"],  # Python cannot ask for these
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="is not an address"):
        addresses.split(text)


@settings(deadline=None, max_examples=50)
@given(
    st.from_regex(r"[a-z]([.]?[a-z0-9-]){0,20}", fullmatch=True)
    | st.ip_addresses().map(str),
    st.integers(0, 65535),
)
def test_split_undoes_join(host, port):
    assert addresses.split(addresses.join(host, port)) == (host, port)


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost.", "127.0.0.1", "127.9.9.9", "::1"]
)
def test_loopback(host):
    assert addresses.is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "10.0.0.1", "host-a", "localhost.com", "::"]
)
def test_no_loopback(host):
    assert not addresses.is_loopback(host)


def test_own_address_is_one_of_this_host():
    assert addresses.own_address("localhost", None) == "127.0.0.1"
    own = addresses.own_address(socket.gethostbyname("localhost"), 1)
    with socket.socket() as probe:
        probe.bind((own, 0))


def test_free_port_is_free():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", addresses.free_port()))


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.3", "::1", socket.gethostname()]
)
def test_this_host_knows_itself(host):
    assert addresses.is_own(host)


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "2001:db8::1", "other.invalid", "a" * 99]
)
def test_others_are_not_this_host(host):
    assert not addresses.is_own(host)
