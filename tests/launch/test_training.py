# SPDX-License-Identifier: Apache-2.0
"""A training by the launcher, with real servers: ended by SIGTERM, or killed."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

import replicator
from tests.cluster import faulty
from tests.launch.stub import Place, line_of

pytestmark = pytest.mark.slow

_ROOT = str(pathlib.Path(replicator.__file__).parent.parent)
_FLAGS = ("--nnodes=2", "--grace=60")  # machines may be busy
_STEPS = 24
# For the training of tests/cluster/faulty.py; step 10 is between two checkpoints.
_PROGRAM = """
import os, random, sys, threading, time
import replicator
from tests.cluster import faulty

how, moment, folder = sys.argv[1:]

class Told(dict):
    def __setitem__(self, k, loss):
        super().__setitem__(k, loss)
        print("loss", k, loss, flush=True)
        if how == "wait" and k == 10:
            time.sleep(0.1 * len(self))  # amid a step; a signal ends it

def fault():
    if how == "kill" and os.environ["REPLICATOR_RESTARTS"] == "0":
        late = random.uniform(0, faulty.LATE[moment])
        threading.Timer(late, lambda: os.kill(os.getpid(), 9)).start()

training = faulty.Training(moment, fault)
training.losses = Told()
if how == "wait":
    replicator.resilient(lambda cluster: training.train(cluster, folder))
else:
    training.train(replicator.connect(), folder)
"""


def _losses(stdout: str) -> list[tuple[int, str]]:
    losses = [line.split() for line in stdout.splitlines() if line.startswith("loss")]
    return [(int(k), loss) for _, k, loss in losses]


def _launch(
    place: Place, *arguments: str, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return place.launch(*_FLAGS, *flags, "train.py", *arguments, PYTHONPATH=_ROOT)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """The losses of a training without a fault."""
    place = Place(tmp_path_factory.mktemp("plain"))
    place.program(_PROGRAM)
    result = _launch(place, "plain", "never", "plain")
    assert result.returncode == 0, result.stderr
    losses = _losses(result.stdout)
    assert [k for k, _ in losses] == list(range(_STEPS))
    return losses


def test_sigterm_saves_and_a_later_launch_goes_on(
    place: Place, plain: list[tuple[int, str]]
) -> None:
    place.program(_PROGRAM)
    arguments = (*_FLAGS, "train.py", "wait", "never", "saved")
    with place.start(*arguments, PYTHONPATH=_ROOT) as started:
        message = ""
        while "loss 10 " not in message:
            message += line_of(started, "loss ")
        started.terminate()
        stdout, stderr = started.communicate(timeout=300)
    assert started.returncode == 143, stderr
    first = _losses(message + stdout)
    assert f"SIGTERM: saved after {len(first)} steps" in stderr
    assert "Traceback" not in stderr
    assert "killed" not in stderr  # no grace period expired
    place.expect_nothing_left()
    later = _launch(place, "plain", "never", "saved")
    assert later.returncode == 0, later.stderr
    assert first + _losses(later.stdout) == plain  # no step is done twice


@pytest.mark.parametrize("moment", ["build", "step", "function", "checkpoint"])
def test_a_program_that_is_killed_starts_anew(
    place: Place, plain: list[tuple[int, str]], moment: str
) -> None:
    place.program(_PROGRAM)
    result = _launch(place, "kill", moment, "saved", flags=("--max-restarts=1",))
    assert result.returncode == 0, result.stderr
    assert "the program has ended: killed by SIGKILL" in result.stderr
    assert "restarting all, 1 of 1" in result.stderr
    losses = _losses(result.stdout)
    assert set(losses) == set(plain)
    assert len(losses) - len(plain) <= faulty.EVERY  # since the last checkpoint
