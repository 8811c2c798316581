# SPDX-License-Identifier: Apache-2.0
"""examples/pipeline.py: a pipeline trains like one device."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.examples import programs

pipeline = programs.load("pipeline")

BATCH, STEPS = 32, 4
CPUS = [f"CPU:{k}" for k in range(4)]
# For each: the devices, and how they are used.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {}),
    "two replicas": (2, {"micro_batches": 4}),
    "whole batches": (2, {"micro_batches": 1}),
    "four replicas": (4, {"micro_batches": 2}),
    "two pipelines": (4, {"micro_batches": 2, "pipelines": 2}),
    "two devices": (2, {"mode": "devices", "micro_batches": 4}),
    "two pipelines of devices": (
        4,
        {"mode": "devices", "micro_batches": 2, "pipelines": 2},
    ),
}
NOT_ALL_FAST = [
    pytest.param(name, marks=[pytest.mark.slow] if "four" in name else [])
    for name in WAYS
]


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = pipeline.load_examples()[0]
    rows = slice(step * BATCH, (step + 1) * BATCH)
    return images[rows], labels[rows]


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[np.ndarray]]:
    """The losses and weights of Keras on one device, without Replicator."""
    tf.keras.utils.set_random_seed(1)
    (model,) = pipeline.make_stages(1, size=64)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(1e-3), loss)
    losses = [float(model.train_on_batch(*batch(step))) for step in range(STEPS)]
    return losses, model.get_weights()


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", NOT_ALL_FAST)
def test_a_pipeline_trains_as_one_device_does(
    name: str, plain: tuple[list[float], list[np.ndarray]]
) -> None:
    count, how = WAYS[name]
    training = pipeline.Training(CPUS[:count], **how)

    def input_fn(ctx: Any) -> tf.data.Dataset:
        def own(step: int) -> tuple[np.ndarray, np.ndarray]:
            images, labels = batch(step)
            return tuple(
                x[ctx.replica_id :: ctx.num_replicas] for x in (images, labels)
            )

        steps = [own(step) for step in range(STEPS)]
        columns = tuple(map(np.stack, zip(*steps, strict=True)))
        return tf.data.Dataset.from_tensor_slices(columns)

    step = training.repl.build(training.train_step, training.input(input_fn))
    losses = [float(step()) for _ in range(STEPS)]
    weights = [v.numpy() for v in pipeline.variables_of(training.stages)]

    np.testing.assert_allclose(losses, plain[0], rtol=0, atol=1e-5)
    for own, expected in zip(weights, plain[1], strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["messages", "devices"])
def test_each_device_holds_its_stage_and_what_the_optimizer_keeps_of_it(
    mode: str,
) -> None:
    training = pipeline.Training(CPUS[:2], mode)
    for k, stage in enumerate(training.stages):
        names = [v.path.replace("/", "_") for v in stage.trainable_variables]
        slots = [
            v
            for v in training.optimizer.variables
            if any(name in v.path for name in names)
        ]
        assert len(slots) == 2 * len(names)  # Adam's two moments
        for variable in (*stage.trainable_variables, *slots):
            devices = {c.device for c in variable.value.components}
            assert [name[-5:] for name in devices] == [CPUS[k]]


def test_the_backward_pass_is_where_the_stage_is() -> None:
    training = pipeline.Training(CPUS[:2], "devices")
    places: list[set[str]] = [set(), set()]

    def step_fn(images: tf.Tensor, labels: tf.Tensor) -> Any:
        training.train_step(images, labels)
        for op in tf.compat.v1.get_default_graph().get_operations():
            for k in range(2):
                if op.type == "MatMul" and f"/stage_{k}" in op.name:
                    places[k].add(op.device[-5:])

    training.repl.run(step_fn, training.input(lambda ctx: batch(0)))
    assert places == [{"CPU:0"}, {"CPU:1"}]


@pytest.mark.slow
def test_every_test_image_counts_once_and_a_run_may_go_on_with_other_stages(
    tmp_path: pathlib.Path,
) -> None:
    flags = ["--global_batch_size=256", "--micro_batches=2", "--learning_rate=0.01"]
    broken, whole = (f"--output_dir={tmp_path / name}" for name in ("broken", "whole"))
    programs.call_well("pipeline", broken, *flags, "--epochs=1")
    flags.append("--epochs=3")
    devices = ["--mode=devices", "--devices=CPU:0,CPU:1,CPU:2"]
    printed = programs.call_well("pipeline", broken, "--resume", *devices, *flags)
    programs.call_well("pipeline", whole, *flags)

    assert "epoch 3/3  loss" in printed
    assert f"Results are in {tmp_path / 'broken'}" in printed
    resumed, expected = (
        programs.history(tmp_path / name) for name in ("broken", "whole")
    )
    np.testing.assert_allclose(resumed["loss"], expected["loss"], rtol=0, atol=1e-5)
    assert resumed["accuracy"] == expected["accuracy"]
    assert resumed["loss"][-1] < 0.7 * resumed["loss"][0]
    for accuracy in expected["accuracy"]:
        assert accuracy * 360 == pytest.approx(round(accuracy * 360), abs=1e-6)
    for picture in ("curves.png", "plan.png"):
        assert (tmp_path / "whole" / picture).read_bytes().startswith(b"\x89PNG")
