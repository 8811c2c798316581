# SPDX-License-Identifier: Apache-2.0
"""Lists of hosts and hostfiles are parsed as written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.launch import hostfile, hosts
from replicator.launch.hosts import JobHost, LaunchError

_OWN = frozenset({"localhost", "127.0.0.1", "here"})
_NAMES = st.from_regex(
    r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True
) | st.sampled_from(["10.0.0.7", "::1", "fe80::2", "host_b", "a.b.example"])
_USERS = st.none() | st.sampled_from(["alice", "svc-train", "a.b"])
_HOSTS = st.lists(
    st.builds(JobHost, _NAMES, st.integers(1, hostfile.MOST_SLOTS), _USERS),
    min_size=1,
    max_size=6,
    unique_by=lambda host: host.name,
)


def _text(host: JobHost, slots: bool = True) -> str:
    user = f"{host.user}@" if host.user else ""
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{user}{name}:{host.slots}" if slots else f"{user}{name}"


@given(_HOSTS)
def test_lists_read_back(listed: list[JobHost]) -> None:
    text = ", ".join(map(_text, listed))
    assert hosts.parse_hosts(text, 1, _OWN) == listed
    bare = ",".join(_text(host, slots=False) for host in listed)
    names = [(host.name, host.user) for host in listed]
    actual = hosts.parse_hosts(bare, 7, _OWN)
    assert [(host.name, host.user) for host in actual] == names
    assert {host.slots for host in actual} == {7}


@given(_HOSTS, st.sampled_from([" slots={}", " slots={} max_slots=4096", ":{}"]))
def test_hostfiles_read_back(listed: list[JobHost], form: str) -> None:
    lines = [_text(host, False) + form.format(host.slots) for host in listed]
    text = "# all of them\n\n" + "".join(f"  {line}  # comment\n" for line in lines)
    assert hosts.parse_hostfile(text, 1, _OWN, "file") == listed


@given(st.text(max_size=30) | st.text("ab:@[],.-0123456789= \n#", max_size=30))
def test_whatever_is_written_is_read_or_refused(text: str) -> None:
    for parse in (
        lambda: hosts.parse_hosts(text, 1, _OWN),
        lambda: hosts.parse_hostfile(text, 1, _OWN, "file"),
    ):
        try:
            actual = parse()
        except LaunchError:
            continue
        assert actual
        for host in actual:
            assert host.name
            assert not {*host.name} & set(" ,@\n[]#")
            assert 1 <= host.slots <= hostfile.MOST_SLOTS


@pytest.mark.parametrize(
    ("text", "local"),
    [("here", True), ("localhost:2", True), ("me@here", False), ("there", False)],
)
def test_which_are_this_host(text: str, local: bool) -> None:
    assert hosts.parse_hosts(text, 1, _OWN)[0].local is local


def test_own_names_have_the_loopback() -> None:
    assert {"localhost", "127.0.0.1", "::1"} < hosts.own_names()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--hosts: '' is not a host; expected NAME, NAME:SLOTS or USER@NAME:SLOTS"),
        ("a,,b", "'' is not a host"),
        ("a b", "'a b' is not a host"),
        ("-oProxyCommand=x", "is not a host"),
        ("@a", "'@a' is not a host"),
        ("-l@a", "'-l@a' is not a host"),
        ("[a]:2", "'[a]:2' is not a host"),
        ("a:0", "--hosts: a:0: '0' is not a number of replicas from 1 to 4096"),
        ("a:x", "'x' is not a number of replicas"),
        ("a:", "'' is not a number of replicas"),
        ("a:99999", "'99999' is not a number of replicas"),
        ("a,b,a:2", "a is named twice; a:2 puts two replicas on it"),
        ("here,localhost", "here and localhost are both this host; --nnodes=N"),
    ],
)
def test_bad_lists_are_named(text: str, said: str) -> None:
    with pytest.raises(LaunchError) as raised:
        hosts.parse_hosts(text, 1, _OWN)
    assert said in str(raised.value)
    assert raised.value.status == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# nobody\n", "f names no host"),
        ("a\nb slots=x\n", "f, line 2: slots=x: 'x' is not a number of replicas"),
        ("a cpus=2", "f, line 1: unknown word 'cpus=2'; expected slots=NUMBER"),
        ("a slots=3 max-slots=2", "f, line 1: more slots than max_slots"),
        ("a:3 max_slots=2", "f, line 1: more slots than max_slots"),
        ("a\na\n", "f: a is named twice"),
    ],
)
def test_bad_hostfiles_are_named(text: str, said: str) -> None:
    with pytest.raises(LaunchError) as raised:
        hosts.parse_hostfile(text, 1, _OWN, "f")
    assert said in str(raised.value)
