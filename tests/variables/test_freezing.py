# SPDX-License-Identifier: Apache-2.0
"""Functions that read variables are frozen, or say how they can be."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers
from tests.variables import parted

INITIAL = np.arange(8, dtype=np.float32).reshape(4, 2)
X = np.ones([1, 4], np.float32)


def _model(repl: Any) -> Any:
    model: Any = tf.Module()
    with repl.context():
        model.w = tf.Variable(INITIAL)
    signature = [tf.TensorSpec([None, 4])]
    model.f = tf.function(lambda x: x @ model.w, input_signature=signature)
    return model


def _result(function: Any) -> Any:
    """Freezes a function, as TensorFlow Lite does, and calls it."""
    concrete = [function.get_concrete_function()]
    content = tf.lite.TFLiteConverter.from_concrete_functions(concrete).convert()
    interpreter = tf.lite.Interpreter(model_content=content)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], X)
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
def test_whole_variables_are_frozen(variables: Any) -> None:
    model = _model(helpers.make(2, variables=variables))
    np.testing.assert_array_equal(_result(model.f), X @ INITIAL)


def test_variables_in_parts_are_frozen_once_they_are_saved(
    tmp_path: pathlib.Path,
) -> None:
    model = _model(parted.replicas(2))
    with pytest.raises(
        replicator.UnsupportedError,
        match=r"(?s)frozen or converted.*Variable:0, but it is split into 3 parts.*"
        r"test_freezing.py.*Fix: save it by tf.saved_model.save",
    ):
        _result(model.f)
    tf.saved_model.save(model, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_array_equal(_result(loaded.f), X @ INITIAL)
