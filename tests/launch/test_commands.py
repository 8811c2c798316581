# SPDX-License-Identifier: Apache-2.0
"""The commands of servers and programs."""

from __future__ import annotations

import dataclasses
import json

from hypothesis import given
from hypothesis import strategies as st

from replicator.cluster import description
from replicator.launch import commands
from replicator.launch.commands import Serving
from replicator.launch.flags import Job
from replicator.launch.hosts import JobHost

_JOB = Job((JobHost("a", 2), JobHost("b")), "--hosts=a:2,b", ("train.py", "--x"))


def test_connect_reads_what_the_launcher_describes() -> None:
    up = [Serving("10.0.0.1:41273", 0), Serving("10.0.0.2:5", 4)]
    text = commands.describe(_JOB, "10.0.0.9:0", up)
    read = description.from_json(text, "REPLICATOR_CLUSTER")
    assert read == description.Description(
        (
            description.Host("a", "10.0.0.1:41273", 2, 0),
            description.Host("b", "10.0.0.2:5", 1, 4),
        ),
        "--hosts=a:2,b",
        "10.0.0.9:0",
        10.0,
    )


def test_connect_reads_which_of_the_programs_it_is() -> None:
    text = commands.describe_part(_JOB, ["10.0.0.1:41273", "10.0.0.2:5"], 1)
    read = description.from_json(text, "REPLICATOR_CLUSTER")
    assert read == description.Description(
        (
            description.Host("a", "10.0.0.1:41273", 2, None),
            description.Host("b", "10.0.0.2:5", 1, None),
        ),
        "--hosts=a:2,b",
        None,
        10.0,
        1,
    )


def test_commands() -> None:
    command = commands.server(_JOB, _JOB.hosts[0], "10.0.0.1:0", "/python", "/cwd")
    assert command.argv == (
        *("/python", "-m", "replicator.serve", "--port=0", "--host=10.0.0.1"),
        *("--cpus=2", "--watch=stdin"),
    )
    assert command.stopped == 0.7 * _JOB.heartbeat  # time to look, kill and report
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "1"}
    assert command.env == {"PYTHONUNBUFFERED": "1", **quiet}
    for job, more in [
        (dataclasses.replace(_JOB, verbose=True), {}),
        (dataclasses.replace(_JOB, env={"TF_CPP_MIN_LOG_LEVEL": "0"}), {**quiet}),
    ]:
        env = commands.server(job, job.hosts[0], "10.0.0.1:0", "/python", "/cwd").env
        assert env == {"PYTHONUNBUFFERED": "1", **more, **job.env}
    command = commands.program(_JOB, "{}", 3, "null", "/cwd")
    assert command.argv[1:] == ("train.py", "--x")
    assert command.env == {"REPLICATOR_CLUSTER": "{}", "REPLICATOR_RESTARTS": "3"}
    job = dataclasses.replace(_JOB, env={"A": "b", "REPLICATOR_RESTARTS": "9"})
    command = commands.part(job, "{}", 3, "/python", "/cwd")
    assert command.argv == ("/python", "train.py", "--x")
    assert command.env == {
        "A": "b",
        "PYTHONUNBUFFERED": "1",
        "REPLICATOR_CLUSTER": "{}",
        "REPLICATOR_RESTARTS": "3",
    }
    assert (command.stdin, command.stopped) == ("null", 0.7 * job.heartbeat)


def test_all_learn_from_where_the_others_connect() -> None:
    sources = ["10.0.0.1", "10.0.0.2", "fd00::2"]
    up = [Serving("10.0.0.1:41273", 0), Serving("10.0.0.2:5", 4)]
    addresses = [serving.address for serving in up]
    for text in (
        commands.describe(_JOB, "10.0.0.9:0", up, None, sources),
        commands.describe_part(_JOB, addresses, 1, sources),
        commands.describe_program(dataclasses.replace(_JOB, servers=2), up, 1, sources),
    ):
        read = description.from_json(text, "REPLICATOR_CLUSTER")
        assert read.sources == tuple(sources)
        assert description.from_json(read.to_json(), "again") == read
    listen = ("10.0.0.1:0", "/python", "/cwd", sources)
    command = commands.server(_JOB, _JOB.hosts[0], *listen)
    assert "--peers=10.0.0.1,10.0.0.2,fd00::2" in command.argv


def test_one_line_says_who_can_connect() -> None:
    servers = [Serving("a:1", 0, said) for said in ("10.0.0.1", "10.0.0.1", "all")]
    assert commands.answers("ab", servers[:2]) == "servers answer 10.0.0.1"
    assert commands.answers("abc", servers) == "servers answer 10.0.0.1 (a, b); all (c)"


def test_addresses_with_ports() -> None:
    assert commands.with_port("10.0.0.1", 7) == "10.0.0.1:7"
    assert commands.with_port("fe80::1", 7) == "[fe80::1]:7"
    assert commands.any_port("10.0.0.1") == "10.0.0.1:0"
    assert (
        commands.any_port("fe80::1") == commands.any_port("[fe80::1]") == "[fe80::1]:0"
    )


_FACTS = {"replicator-serve": 1, "address": "a:1", "gpus": 2}


def test_a_servers_line() -> None:
    assert commands.serving(json.dumps(_FACTS).encode()) == Serving("a:1", 2)
    line = json.dumps({**_FACTS, "answers": "whoever reaches eth0"}).encode()
    assert commands.serving(line) == Serving("a:1", 2, "whoever reaches eth0")


@given(
    st.binary() | st.sampled_from([b"[]", b"1", b'{"replicator-serve": 2}', b"null"])
)
def test_other_lines_are_none(line: bytes) -> None:
    assert commands.serving(line) is None
