# SPDX-License-Identifier: Apache-2.0
"""The programs on the documentation's front page run, and are warned of nothing."""

from __future__ import annotations

import pathlib
import re
import runpy

import pytest
import tensorflow as tf

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "index.md"


def test_the_programs_of_the_front_page(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = re.findall("```py\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    assert len(found) == 2
    program = "\n".join(found).replace("GPU:", "CPU:").replace("10_000", "3")
    x = tf.random.stateless_normal([7, 3], seed=[1, 2])
    names = {
        "tf": tf,
        "x": x,
        "y": x[:, :1],
        "make_model": lambda: tf.keras.Sequential([tf.keras.layers.Dense(1)]),
        "loss_fn": tf.keras.losses.MeanSquaredError(),
        "dataset": tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(5).repeat(),
    }
    path = tmp_path / "front_page.py"
    path.write_text(program)
    ran = runpy.run_path(str(path), names)
    assert float(ran["loss"]) > 0
    assert not caplog.text
