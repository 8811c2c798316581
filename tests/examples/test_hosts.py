# SPDX-License-Identifier: Apache-2.0
"""examples/hosts.py, run as a user runs it: by the launcher, on its servers."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import uuid

import numpy as np
import pytest
import tensorflow as tf

from tests import namespaces
from tests.examples import programs
from tests.examples.programs import history
from tests.launch.stub import MARK

_ROOT = pathlib.Path(__file__).parents[2]
_PROGRAM = str(_ROOT / "examples" / "hosts.py")
_LAUNCH = [sys.executable, "-m", "replicator.launch", "--nnodes=2"]
_LIMIT = 600  # seconds; machines may be busy
_STEPS = 22  # of an epoch: 1437 // 64


def run(*flags: object, launch: tuple[str, ...] = ()) -> str:
    """Runs the example on two servers, which must succeed; returns its output."""
    result = subprocess.run(
        [*_LAUNCH, *launch, _PROGRAM, *map(str, flags)],
        env=programs.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of two epochs, and its output."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, run(f"--output_dir={folder}", "--epochs=2")


@pytest.fixture(scope="module")
def example():
    return programs.load("hosts")


@pytest.mark.slow
def test_a_run_tells_of_each_epoch_and_learns(finished):
    folder, printed = finished
    assert "2 replicas on localhost-0, localhost-1; step 0" in printed
    assert "epoch 1/2" in printed and "epoch 2/2" in printed
    assert f"Results are in {folder}" in printed
    assert history(folder)["accuracy"][-1] > 0.85
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert {"ckpt-22.index", "ckpt-44.index"} <= names


@pytest.mark.slow
def test_losses_are_those_of_one_device(finished, example):
    """Plain TensorFlow in this process, on the images of each step by their numbers."""
    train, _ = example.load_examples()
    tf.keras.utils.set_random_seed(1)
    with tf.device("CPU:0"):
        model = example.make_model()
        optimizer = tf.keras.optimizers.SGD(0.05, 0.9)
        optimizer.build(model.trainable_variables)
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(images, labels):
        with tf.device("CPU:0"), tf.GradientTape() as tape:
            loss = loss_fn(labels, model(images))
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    losses = []
    for epoch in range(2):
        order = tf.random.experimental.stateless_shuffle(
            tf.range(len(train), dtype=tf.int64), seed=[1, epoch]
        ).numpy()
        for number in range(_STEPS):
            batch = order[number * 64 : (number + 1) * 64]
            losses.append(float(step(train.images[batch], train.labels[batch])))
    actual = history(finished[0])["loss"]
    np.testing.assert_allclose(actual[:10], losses[:10], rtol=1e-5)
    # Rounding grows: by 2e-3 so far where one device takes the batch in two parts.
    np.testing.assert_allclose(actual, losses, rtol=1e-2)


@pytest.mark.slow
def test_the_model_is_right_wherever_it_is_loaded(finished, example):
    folder, _ = finished
    _, test = example.load_examples()
    model = tf.keras.models.load_model(folder / "model.keras")
    right = np.argmax(model.predict(test.images, verbose=0), axis=1) == test.labels
    assert np.mean(right) == pytest.approx(history(folder)["accuracy"][-1], abs=1e-6)


@pytest.mark.slow
def test_a_run_that_is_ended_goes_on_as_if_it_had_not_been(finished, tmp_path):
    flags = [f"--output_dir={tmp_path}", "--epochs=1000"]
    with subprocess.Popen(
        [*_LAUNCH, _PROGRAM, *flags],
        env=programs.ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as started:
        while "epoch " not in (line := started.stdout.readline()):
            assert line
        started.send_signal(signal.SIGTERM)
        started.communicate(timeout=_LIMIT)
    assert started.returncode == 128 + signal.SIGTERM
    names = (tmp_path / "checkpoints").glob("ckpt-*.index")
    last_step = max(int(path.stem[5:]) for path in names)
    assert last_step >= _STEPS
    epochs = max(2, -(-last_step // _STEPS))
    printed = run(flags[0], f"--epochs={epochs}", "--resume")
    assert f"step {last_step}" in printed
    losses = history(tmp_path)["loss"]
    assert len(losses) == epochs * _STEPS
    assert losses[: 2 * _STEPS] == history(finished[0])["loss"]


@pytest.mark.slow
def test_a_run_may_go_on_with_other_hosts_but_not_with_other_settings(
    finished, tmp_path
):
    folder = shutil.copytree(finished[0], tmp_path / "copy")
    flags = [f"--output_dir={folder}", "--resume", "--epochs=3"]
    printed = run(*flags, launch=("--nnodes=1", "--nproc-per-node=4"))
    assert "4 replicas on localhost-0; step 44" in printed
    assert len(history(folder)["loss"]) == 3 * _STEPS
    result = subprocess.run(
        [*_LAUNCH, _PROGRAM, *flags, "--seed=2"],
        env=programs.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    assert result.returncode == 2
    message = "hosts.py: error: --resume: the run began with --seed=1, not 2"
    assert message in result.stderr.splitlines()
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_batch_that_the_replicas_do_not_divide_is_one_line(tmp_path):
    flags = [f"--output_dir={tmp_path}", "--global_batch_size=63"]
    result = subprocess.run(
        [*_LAUNCH, _PROGRAM, *flags],
        env=programs.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if "hosts.py" in line]
    assert line.startswith("hosts.py: error: ")
    assert "63 examples cannot be divided evenly among 2" in line


# --- From two machines to a trained model --------------------------------------------


def commands() -> list[str]:
    """Returns the five commands of the guide to several hosts."""
    text = (_ROOT / "docs" / "guides" / "hosts.md").read_text()
    section = text.partition("\n## From two machines to a trained model\n")[2]
    return section.split("```bash\n")[1].split("```")[0].strip().splitlines()


@pytest.mark.slow
@pytest.mark.root
def test_five_commands_between_two_hosts(tmp_path):
    """Verbatim, except for packages: pip's downloads come from this environment."""
    work, there = tmp_path / "work", tmp_path / "there"
    there.mkdir()
    _copy(work)
    mark = uuid.uuid4().hex
    variables = _offline(tmp_path)
    with namespaces.pair(tmp_path, mark, variables, (work, there)) as pair:
        _configure(tmp_path, pair.there.address)
        environment = {**os.environ, **variables, "HOME": str(tmp_path), MARK: mark}
        for name in [n for n in environment if n.startswith(("COVERAGE_", "GIT_"))]:
            del environment[name]
        message = ""
        for command in (five := commands()):
            result = subprocess.run(
                pair.here.command("bash", "-o", "pipefail", "-c", command),
                cwd=work,
                env=environment,
                capture_output=True,
                text=True,
                timeout=2 * _LIMIT,
            )
            message = result.stdout
            assert result.returncode == 0, f"{command}: {message}{result.stderr}"
    assert len(five) == 5
    assert "2 replicas on localhost, host-b; step 0" in message
    assert "epoch 10/10" in message
    actual = history(work / "runs" / "hosts")
    assert actual["accuracy"][-1] > 0.95
    assert (work / "runs" / "hosts" / "model.keras").exists()
    assert (there / ".venv").is_dir()  # and nothing of the run
    assert not (there / "runs").exists()


def _copy(work: pathlib.Path) -> None:
    """Clones this repository in its current state on disk."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=_ROOT, capture_output=True, check=False)
    if files.returncode:
        pytest.skip("this is no clone of git's")
    for name in filter(None, files.stdout.decode().split("\0")):
        if (_ROOT / name).is_file():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(_ROOT / name, work / name)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "all"]):
        subprocess.run(["git", *words], cwd=work, check=True)


def _offline(folder: pathlib.Path) -> dict[str, str]:
    """Returns variables that keep pip offline, and make `python3` this one."""
    packages = importlib.util.find_spec("tensorflow").submodule_search_locations[0]
    bin_dir = os.path.dirname(os.path.realpath(sys.executable))
    tools = folder / "tools"
    tools.mkdir()
    ssh = shutil.which("ssh")
    # ssh looks for its files in the user's home, whatever HOME says.
    (tools / "ssh").write_text(f'#!/bin/sh\nexec {ssh} -F "$HOME/.ssh/config" "$@"\n')
    (tools / "ssh").chmod(0o755)
    return {
        "PATH": f"{tools}:{bin_dir}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": os.path.dirname(packages),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # in pip's inverted counting: no isolation
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def _configure(home: pathlib.Path, address: str) -> None:
    """Makes `ssh host-b` log in to the other host."""
    lines = [
        "Host host-b",
        f"  HostName {address}",
        f"  IdentityFile {home}/key",
        f"  UserKnownHostsFile {home}/.ssh/known_hosts",
    ]
    (home / ".ssh" / "config").write_text("\n".join(lines) + "\n")
