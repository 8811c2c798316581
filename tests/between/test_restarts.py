# SPDX-License-Identifier: Apache-2.0
"""Faults of any host during training: the named host, the time, and the restart.

`pytest --faults=10` has each fault happen ten times, in as many lives of one training.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests import namespaces, sampling
from tests.between import failing, launched
from tests.between.launched import Life
from tests.cluster import faulty
from tests.launch.said import Said
from tests.launch.stub import Place

pytestmark = pytest.mark.slow

_MODULE = "tests.between.failing"
_LIMITS = {"kill": 1.0, "stop": launched.HEARTBEAT, "cut": launched.HEARTBEAT}
_ENDS = {
    "kill": "killed by SIGKILL",
    "stop": "killed by SIGKILL",
    "cut": "the connection to its host is lost",
}
_MOMENTS = ("build", "step", "function", "checkpoint")


def _trained(
    place: Place, kind: str, moment: str, which: int, count: int, **options: Any
) -> tuple[list[Life], Said]:
    """Trains on this host in two processes; returns all lives, and the output."""
    arguments = kind, moment, which, count, place.folder / "saved"
    stdout, stderr = launched.run(place, _MODULE, *arguments, restarts=count, **options)
    return launched.lives(stdout), stderr


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

    Each must also begin with the last checkpoint that the previous one had written, or
    was about to write.

    Args:
        lives: All lives.
        wanted: The losses without a fault.
        said_all: Whether all output before a fault has been read.
    """
    last = -1  # the last step that is known to be complete
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
    times = stderr.times(f"{name}: the program has ended: {_ENDS[kind]}")
    faults = [life.fault for life in lives[:-1]]
    assert lives[-1].fault is None
    assert len(times) == len(faults), stderr.text[-6000:]
    if kind == "stop":  # its keeper reports the kill, which takes a while
        times = stderr.times(f"[{name}] replicator.launch: silent for ")
        assert len(times) == len(faults), stderr.text[-6000:]
    seconds = [when - fault for when, fault in zip(times, faults, strict=True) if fault]
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
    anew = [f"restarting all, {k + 1} of {len(faults)}\n" for k in range(len(faults))]
    assert all(len(stderr.times(one)) == 1 for one in anew)


@pytest.mark.parametrize(
    ("kind", "moment", "which"), sampling.in_turn(["kill", "stop"], _MOMENTS, [0, 1])
)
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


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("moment", ["step", "checkpoint"])
def test_a_host_that_is_silent_for_a_moment(
    place: Place,
    uninterrupted: dict[int, str],
    moment: str,
    which: int,
    request: pytest.FixtureRequest,
) -> None:
    """It continues, and so do the others: nobody is lost."""
    count = request.config.getoption("--faults")
    heartbeat = failing.NAP / 0.3
    lives, stderr = _trained(place, "nap", moment, which, count, heartbeat=heartbeat)
    _check_losses(lives, uninterrupted)
    assert [life.named for life in lives] == [[]]
    assert lives[0].fault is not None
    assert "replicator.launch:" not in stderr.text


@pytest.mark.root
@pytest.mark.parametrize(("moment", "which"), sampling.in_turn(_MOMENTS, [1, 0]))
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
        flags = launched.flags(count, ",".join(hosts), *ssh, "--insecure")
        arguments = "cut", moment, 1 - which, count, place.folder / "saved"
        cuts: list[float] = []
        with launched.started(place, flags, _MODULE, *arguments) as began:
            launcher, stdout, stderr = began
            for k in range(count):
                stdout.at(" fault ", k)
                cuts.append(time.monotonic())
                pair.set_link("down", far=True)
                stderr.at("restarting all", k)
                pair.set_link("up", far=True)
            launched.finish(place, launcher, (stdout, stderr), count)
    lives = launched.lives(stdout)
    for life, cut in zip(lives[:-1], cuts, strict=True):
        life.fault = cut
    _check_losses(lives, uninterrupted, said_all=False)
    _check_named(lives, stderr, pair.there.address, "cut")
