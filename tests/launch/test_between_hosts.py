# SPDX-License-Identifier: Apache-2.0
"""Two hosts that are network namespaces: a link of 1 Gbit/s, an sshd, and cut links.

The first tests have stubs for servers; the last one trains.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests import namespaces
from tests.launch.said import Said
from tests.launch.stub import MARK, Place
from tests.launch.test_tunnel import _ALL, _ASK, _said

pytestmark = [pytest.mark.slow, pytest.mark.root]

_ROOT = pathlib.Path(__file__).parents[2]
_HEARTBEAT = 4.0  # seconds
_READY = "print('ready', flush=True)\n"
_WAIT = _READY + "import signal\nsignal.pause()\n"
_LOST = "its server has ended: the connection to its host is lost"


@pytest.fixture
def pair(place: Place, tmp_path: pathlib.Path) -> Iterator[namespaces.Pair]:
    """Two hosts; launchers run on one of them."""
    with namespaces.pair(tmp_path, place.mark) as hosts:
        place.prefix = hosts.here.command()
        yield hosts


def _flags(pair: namespaces.Pair, *more: str) -> list[str]:
    return [*pair.server.flags, f"--heartbeat={_HEARTBEAT:g}", *more]


@pytest.mark.parametrize("also_here", [False, True])
def test_servers_and_the_program_reach_one_another_by_the_tunnel(
    place: Place, pair: namespaces.Pair, also_here: bool
) -> None:
    place.program(_ASK)
    hosts, *flags = _flags(pair, "--tunnel", "train.py")
    result = place.launch(f"{hosts},localhost" if also_here else hosts, *flags)
    assert result.returncode == 0, result.stderr
    alone = ["said server 0", "said by way of 0: program"]
    assert _said(result.stdout) == (_ALL if also_here else alone), result.stderr


def test_servers_that_others_reach_are_refused_by_their_address(
    place: Place, pair: namespaces.Pair
) -> None:
    place.program(_READY)
    result = place.launch(*_flags(pair, "train.py"))
    assert result.returncode == 2
    message = f"whoever reaches {pair.there.address} could run code there"
    assert message in result.stderr
    assert "ready" not in result.stdout


@pytest.mark.parametrize("far", [False, True], ids=["here", "there"])
@pytest.mark.parametrize("way", ["--insecure", "--tunnel"])
def test_a_host_that_is_cut_off_is_named_within_the_heartbeat(
    place: Place, pair: namespaces.Pair, way: str, far: bool
) -> None:
    place.program(_WAIT)
    with place.start(*_flags(pair, way, "train.py")) as started:
        streams = Said(started.stdout), Said(started.stderr)
        streams[0].at("ready")
        assert place.processes("replicator.serve")
        cut = time.monotonic()
        pair.set_link("down", far)
        named = streams[1].at(f"{pair.there.address}: {_LOST}")
        assert started.wait(60) == 255
    assert named - cut < _HEARTBEAT
    # There, the keeper loses its connection, and ends its process.
    place.expect_nothing_left()


def test_a_link_that_is_cut_for_a_moment_ends_nothing(
    place: Place, pair: namespaces.Pair
) -> None:
    place.program(f"{_READY}import time\ntime.sleep({2 * _HEARTBEAT})\n")
    with place.start(*_flags(pair, "--insecure", "train.py")) as started:
        streams = Said(started.stdout), Said(started.stderr)
        streams[0].at("ready")
        pair.set_link("down", far=True)
        time.sleep(_HEARTBEAT / 8)
        pair.set_link("up", far=True)
        assert started.wait(60) == 0, streams[1].text


@pytest.mark.parametrize("way", ["--insecure", "--tunnel"])
def test_a_host_that_comes_back_is_used_again(
    place: Place, pair: namespaces.Pair, way: str
) -> None:
    again = "import os\nif os.environ['REPLICATOR_RESTARTS'] == '1':\n"
    place.program(f"{again}    raise SystemExit\n{_WAIT}")
    with place.start(*_flags(pair, way, "--max-restarts=1", "train.py")) as started:
        streams = Said(started.stdout), Said(started.stderr)
        streams[0].at("ready")
        pair.set_link("down")
        streams[1].at(_LOST)
        pair.set_link("up")
        assert started.wait(120) == 0, streams[1].text


# --- Training with TensorFlow's servers ----------------------------------------------

_EPOCHS = 40
_LONGER = 8.0  # seconds, of a heartbeat: restoring a program takes part of it


def _train(
    pair: namespaces.Pair, mark: str, folder: pathlib.Path, *more: str
) -> subprocess.Popen[str]:
    """Starts examples/hosts.py on both hosts."""
    hosts, *flags = *pair.server.flags, "--insecure", f"--heartbeat={_LONGER:g}"
    program = [str(_ROOT / "examples" / "hosts.py"), f"--epochs={_EPOCHS}"]
    launch = (sys.executable, "-m", "replicator.launch", f"{hosts},localhost:2")
    return subprocess.Popen(
        pair.here.command(*launch, *flags, *more, *program, f"--output_dir={folder}"),
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")},
            "PYTHONPATH": str(_ROOT),
            "PYTHONUNBUFFERED": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HOME": str(pair.server.root),
            MARK: mark,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _losses(folder: pathlib.Path) -> list[float]:
    return json.loads((folder / "history.json").read_text())["loss"]


def test_a_training_goes_on_after_the_link_was_cut(
    place: Place, pair: namespaces.Pair, tmp_path: pathlib.Path
) -> None:
    with _train(pair, place.mark, tmp_path / "whole") as started:
        streams = Said(started.stdout), Said(started.stderr)
        assert started.wait(600) == 0, streams[1].text
    there = pair.there.address
    with _train(pair, place.mark, tmp_path / "cut", "--max-restarts=1") as started:
        streams = Said(started.stdout), Said(started.stderr)
        streams[0].at("epoch  2/")
        cut = time.monotonic()
        pair.set_link("down", far=True)
        named = streams[1].at(f"1 of 2 hosts is lost: {there}.")
        lost_at = streams[1].at(f"{there}: {_LOST}; restarting it, 1 of 1")
        pair.set_link("up", far=True)
        assert started.wait(600) == 0, streams[1].text
        epochs = re.findall(r"epoch +(\d+)/", streams[0].text)
    assert max(named, lost_at) - cut < _LONGER
    assert f"{there}: its server is up again" in streams[1].text
    assert epochs[-1] == str(_EPOCHS)
    assert _losses(tmp_path / "cut") == _losses(tmp_path / "whole")
    assert not place.processes("replicator.serve")


_ALONE = """
import replicator, tensorflow as tf

def train(cluster):
    repl = replicator.Replicator(cluster.devices)
    with repl.context():
        v = tf.Variable(tf.zeros([1000]))
    checkpoint = cluster.checkpoint("saved", v=v)
    def step_fn():
        v.assign_add(repl.all_reduce(tf.ones([1000])))
    for count, _ in enumerate(checkpoint.steps(10**6, every=50)):
        repl.run(step_fn)
        if count == 60:
            print(f"on {repl.num_replicas}", flush=True)
            if repl.num_replicas == 1:
                return

replicator.resilient(train)
"""


def test_training_goes_on_at_once_without_a_machine_that_is_off(
    place: Place, pair: namespaces.Pair
) -> None:
    place.program(_ALONE)
    hosts, *flags = _flags(pair, "--insecure", "--min-nodes=1", "train.py")
    env = {"PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": ""}
    there, here = pair.there, pair.here
    with place.start(f"{hosts.rpartition(':')[0]},localhost", *flags, **env) as started:
        streams = Said(started.stdout), Said(started.stderr)
        streams[0].at("on 2")
        drop = f"ip -n {there.namespace} route add blackhole {here.address}/32"
        subprocess.run(drop.split(), check=True)  # no packet of its returns
        streams[1].at(f"continuing with 1 of 2 hosts, without {there.address}")
        named = streams[1].at("Connecting again")
        again = streams[0].at("on 1")
        assert started.wait(120) == 0, streams[1].text
    assert again - named < 10  # TensorFlow's own limit for a connection is 20
