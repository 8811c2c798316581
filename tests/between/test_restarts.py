"""Faults of any host while all train: who is named, when, and what the launcher does.

`pytest --faults=10` has each fault happen ten times, in as many lives of one training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from tests import namespaces
from tests.between import failing
from tests.cluster import faulty, servers
from tests.launch.said import Said
from tests.launch.stub import MARK, Place

pytestmark = pytest.mark.slow

_HEARTBEAT = 5.0  # seconds
_LIMITS = {"kill": 1.0, "stop": _HEARTBEAT, "cut": _HEARTBEAT}
_LIFE = 120.0  # seconds that one may take on a busy machine
_ENDS = {
    "kill": "killed by SIGKILL",
    "stop": "killed by SIGKILL",
    "cut": "the connection to its host is lost",
}
_MOMENTS = ("build", "step", "function", "checkpoint")


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Iterator[Place]:
    """Whose processes have a mark, and of which nothing is left afterwards."""
    made = Place(tmp_path)
    yield made
    made.expect_nothing_left()


@dataclasses.dataclass
class Life:
    """What one life of the training has said, on any host.

    Attributes:
        begun: How many steps were done when it began, by each host.
        losses: By host and step.
        fault: When the fault was.
        named: When which hosts were named, by each program that was told.
    """

    begun: list[int]
    losses: dict[tuple[str, int], str]
    fault: float | None
    named: list[tuple[float, list[str]]]


def _lives(said: Said) -> list[Life]:
    """Returns what each life has said: each begins with all hosts."""
    lives: list[Life] = []
    for _, line in said.lines:
        match = re.fullmatch(r"\[(\S+)\] +(begun|loss|fault|named) (.*)\n", line)
        if match is None:
            continue
        host, word, rest = match.groups()
        words = rest.split()
        if word == "begun" and (not lives or len(lives[-1].begun) == 2):
            lives.append(Life([], {}, None, []))
        life = lives[-1]
        if word == "begun":
            life.begun.append(int(rest))
        elif word == "loss":
            life.losses[host, int(words[0])] = words[1]
        elif word == "fault":
            life.fault = float(rest)
        else:
            life.named.append((float(words[0]), words[1:]))
    return lives


def _flags(count: int, *more: str) -> list[str]:
    return [
        "--mode=between",
        f"--heartbeat={_HEARTBEAT:g}",
        f"--max-restarts={count}",
        *more,
        "-m",
        "tests.between.failing",
    ]


@contextlib.contextmanager
def _started(
    place: Place, flags: Sequence[str], *arguments: object
) -> Iterator[tuple[subprocess.Popen[str], Said, Said]]:
    """Starts the launcher; yields it, and what it writes."""
    words = [*flags, *map(str, arguments), str(place.folder / "saved")]
    env = servers.environment(HOME=place.env["HOME"], **{MARK: place.mark})
    with subprocess.Popen(
        [*place.prefix, sys.executable, "-m", "replicator.launch", *words],
        cwd=servers.ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            yield started, Said(started.stdout), Said(started.stderr)
        finally:
            started.kill()


def _trained(
    place: Place, kind: str, moment: str, which: int, count: int
) -> tuple[list[Life], Said]:
    """Trains on this host by two processes; returns all lives, and what was said."""
    arguments = kind, moment, which, count
    with _started(place, _flags(count, "--nnodes=2"), *arguments) as began:
        started, stdout, stderr = began
        assert started.wait(_LIFE * (count + 1)) == 0, stderr.text[-6000:]
        stdout.finish()
        stderr.finish()
    place.expect_nothing_left()
    return _lives(stdout), stderr


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[int, str]:
    """The losses of a training without a fault, by step."""
    place = Place(tmp_path_factory.mktemp("whole"))
    count = request.config.getoption("--faults")
    (life,), _ = _trained(place, "none", "step", 0, count)
    assert life.begun == [0, 0]
    own, other = (
        {k: loss for (name, k), loss in life.losses.items() if name == host}
        for host in sorted({name for name, _ in life.losses})
    )
    assert own == other
    assert [*own] == [*range(failing.steps(count))]
    return own


def _check_losses(
    lives: Sequence[Life], wanted: dict[int, str], said_all: bool = True
) -> None:
    """Fails unless all lives have the losses of a training without a fault.

    And each began with the last checkpoint that the one before had written, or with
    the one that it was about to write.

    Args:
        lives: All.
        wanted: The losses without a fault.
        said_all: Whether all is read that was said before a fault.
    """
    last = -1  # the last step that is known to be done
    for life in lives:
        assert len(life.begun) == 2 and len({*life.begun}) == 1, life.begun
        certain = max(0, last - last % faulty.EVERY)  # saved before its step began
        next_one = certain + faulty.EVERY
        possible = {certain}
        if last + 1 == next_one or not said_all:
            possible.add(next_one)
        assert life.begun[0] in possible, (last, life.begun)
        for (host, k), loss in life.losses.items():
            assert loss == wanted[k], (host, k)
        last = max((k for _, k in life.losses), default=life.begun[0] - 1)
        if not life.losses and life.begun[0]:
            last = life.begun[0]
    assert {k for life in lives for _, k in life.losses} == {*wanted}


def _check_named(lives: Sequence[Life], stderr: Said, name: str, kind: str) -> None:
    """Fails unless the launcher and the programs have named the host, in time."""
    told = stderr.times(f"{name}: the program has ended: {_ENDS[kind]}")
    faults = [life.fault for life in lives[:-1]]
    assert lives[-1].fault is None
    assert len(told) == len(faults), stderr.text[-6000:]
    seconds = [when - fault for when, fault in zip(told, faults, strict=True) if fault]
    by_programs = [
        when - life.fault
        for life in lives
        for when, names in life.named
        if life.fault and names == [name]
    ]
    print(kind, name, [f"{s:.2f}" for s in seconds], [f"{s:.2f}" for s in by_programs])
    assert len(seconds) == len(faults)
    assert max(seconds) < _LIMITS[kind]
    for life in lives:
        for _, names in life.named:
            assert names == [name]
    assert max(by_programs, default=0.0) < _LIMITS[kind]
    anew = [f"starting anew, {k + 1} of {len(faults)}\n" for k in range(len(faults))]
    assert all(len(stderr.times(one)) == 1 for one in anew)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("moment", _MOMENTS)
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_faults(
    place: Place,
    uninterrupted: dict[int, str],
    kind: str,
    moment: str,
    which: int,
    request: pytest.FixtureRequest,
) -> None:
    count = request.config.getoption("--faults")
    lives, stderr = _trained(place, kind, moment, which, count)
    _check_losses(lives, uninterrupted)
    _check_named(lives, stderr, f"localhost-{which}", kind)
    assert len(lives) == count + 1


@pytest.mark.root
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("moment", _MOMENTS)
def test_cut_links(
    place: Place,
    uninterrupted: dict[int, str],
    tmp_path: pathlib.Path,
    moment: str,
    which: int,
    request: pytest.FixtureRequest,
) -> None:
    """The link to one of two hosts is cut; the launcher is on the other."""
    count = request.config.getoption("--faults")
    with namespaces.pair(tmp_path, place.mark) as pair:
        place.prefix = pair.here.command()
        there, *ssh = pair.server.flags
        hosts = [there.replace(":2", ":1"), "localhost:1"]
        if which == 1:
            hosts = [f"--hosts=localhost:1,{hosts[0].removeprefix('--hosts=')}"]
        flags = _flags(count, ",".join(hosts), *ssh, "--insecure")
        cuts: list[float] = []
        with _started(place, flags, "cut", moment, 1 - which, count) as began:
            started, stdout, stderr = began
            for k in range(count):
                stdout.at(" fault ", k)
                cuts.append(time.monotonic())
                pair.set_link("down", far=True)
                stderr.at("starting anew", k)
                pair.set_link("up", far=True)
            assert started.wait(_LIFE) == 0, stderr.text[-6000:]
            stdout.finish()
            stderr.finish()
        place.expect_nothing_left()
    lives = _lives(stdout)
    for life, cut in zip(lives[:-1], cuts, strict=True):
        life.fault = cut
    _check_losses(lives, uninterrupted, said_all=False)
    _check_named(lives, stderr, pair.there.address, "cut")
