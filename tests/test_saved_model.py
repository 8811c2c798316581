# SPDX-License-Identifier: Apache-2.0
"""A model that was trained replicated is exported, and serves without replicator."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

K = tf.keras
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)

SERVE = """
    import sys
    import numpy as np
    import tensorflow as tf
    try:
        import replicator
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError(f"replicator is importable: {replicator.__file__}")
    folder, x, signature = sys.argv[1:4]
    x = np.load(x)
    loaded = tf.saved_model.load(folder)
    function = getattr(loaded, signature)
    results = [function(tf.constant(x))]
    variables = function.concrete_functions[0].graph.variables
    assert all(type(v).__module__.startswith("tensorflow") for v in variables)
    if hasattr(loaded, "train"):
        loaded.train(tf.constant(x))
        results.append(function(tf.constant(x)))
        loaded.reset()
        results.append(loaded.calls)
    np.savez(folder + "/served.npz", *map(np.asarray, results), names=len(variables))
"""


class Regression(tf.Module):
    """A model with its own step, which can continue training where it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = tf.Variable([[1.0], [2.0], [3.0]], name="weights")
        self.calls = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        self.table = {"scale": tf.Variable(2.0, trainable=False)}

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def predict(self, x: tf.Tensor) -> tf.Tensor:
        return x @ self.weights * self.table["scale"] + self.calls

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def train(self, x: tf.Tensor) -> None:
        self.weights.assign_sub(tf.reduce_mean(x) + tf.ones([3, 1]))
        self.calls.assign_add(1.0)

    @tf.function(input_signature=[])
    def reset(self) -> None:
        self.calls.assign(5.0)


def serve(folder: pathlib.Path, signature: str, cwd: pathlib.Path) -> Any:
    """Returns the model's output in a process without replicator."""
    np.save(cwd / "x.npy", X)
    arguments = [str(folder), str(cwd / "x.npy"), signature]
    # Isolated: searches neither the working directory nor PYTHONPATH.
    program = ["-I", "-c", hide_editable() + textwrap.dedent(SERVE)]
    result = subprocess.run(
        [sys.executable, *program, *arguments], cwd=cwd, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return np.load(folder / "served.npz")


def hide_editable() -> str:
    """Returns code that hides an installed replicator, if this environment has one."""
    return "import sys; sys.modules['replicator'] = None\n" if installed() else ""


def installed() -> bool:
    probe = "import importlib.util as u; print(u.find_spec('replicator') is not None)"
    result = subprocess.run(
        [sys.executable, "-I", "-c", probe], capture_output=True, text=True, check=True
    )
    return result.stdout.strip() == "True"


def test_modules_are_saved_plain_and_go_on_training(tmp_path: pathlib.Path) -> None:
    repl = helpers.make(2)
    with repl.context():
        model = Regression()

    def step_fn() -> None:
        model.weights.assign_sub(model.weights * (0.1 + repl.replica_id))
        model.calls.assign_add(1.0)

    repl.run(step_fn)
    before = model.predict(X).numpy()
    np.testing.assert_allclose(before, X @ [[0.4], [0.8], [1.2]] * 2 + 2, rtol=1e-5)
    tf.saved_model.save(model, str(tmp_path / "saved"))
    served = serve(tmp_path / "saved", "predict", tmp_path)
    np.testing.assert_array_equal(served["arr_0"], before)
    model.train(X)
    helpers.assert_replicas_equal([model.weights])
    np.testing.assert_allclose(served["arr_1"], model.predict(X), rtol=1e-6)
    assert served["arr_2"] == 5.0
    assert served["names"] == 3


def test_sessions_restore_what_was_saved(tmp_path: pathlib.Path) -> None:
    repl = helpers.make(2)
    with repl.context():
        model = Regression()
    repl.run(lambda: model.calls.assign_add(1.0 + repl.replica_id))
    expected = model.predict(X)
    tf.saved_model.save(model, str(tmp_path / "saved"), signatures=model.predict)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(
            session, ["serve"], str(tmp_path / "saved")
        )
        signature = meta.signature_def["serving_default"]
        (fetch,), (feed,) = signature.outputs.values(), signature.inputs.values()
        result = session.run(fetch.name, {feed.name: X})
    np.testing.assert_array_equal(result, expected)


def test_traces_that_cannot_be_saved_are_refused(tmp_path: pathlib.Path) -> None:
    with helpers.make(2).context():
        model = Regression()
    stale = model.predict.get_concrete_function()
    with pytest.raises((ValueError, AssertionError), match="untracked|not tracked"):
        tf.saved_model.save(model, str(tmp_path / "saved"), signatures=stale)


def test_saving_leaves_the_replicas_as_they_were(tmp_path: pathlib.Path) -> None:
    repl = helpers.make(2)
    with repl.context():
        model = Regression()
    tf.saved_model.save(model, str(tmp_path / "saved"))
    repl.run(lambda: model.calls.assign_add(1.0 + repl.replica_id))
    assert helpers.components(model.calls) == [1.0, 2.0]
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert loaded.calls.numpy() == 0.0


@pytest.mark.mirrored
def test_loading_under_the_context_replicates(tmp_path: pathlib.Path) -> None:
    original = Regression()
    tf.saved_model.save(original, str(tmp_path / "saved"))
    repl = helpers.make(2, build="trace")
    with repl.context():
        loaded = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_allclose(loaded.predict(X), original.predict(X))
    loaded.weights.assign([[5.0], [5.0], [5.0]])
    assert np.shape(helpers.components(loaded.weights)) == (2, 3, 1)
    helpers.assert_replicas_equal([loaded.weights])
    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)replica 1 uses another replica's component of variable weights:0"
        r".*Fix:.*loaded SavedModel",
    ):
        repl.run(lambda: loaded.predict(X))


@pytest.mark.battery(5)
@pytest.mark.parametrize("way", ["export", "saved_model"])
def test_keras_models_serve_without_replicator(
    way: str, tmp_path: pathlib.Path
) -> None:
    repl = helpers.make(2)
    with repl.context():
        model = K.Sequential(
            [
                K.Input([3]),
                K.layers.Dense(4, activation="tanh"),
                K.layers.BatchNormalization(),
                K.layers.Dropout(0.5),
                K.layers.Dense(2),
            ]
        )
        optimizer = repl.wrap_optimizer(K.optimizers.Adam(0.1))

    def step_fn() -> None:
        with tf.GradientTape() as tape:
            outputs = model(X * (1.0 + repl.replica_id), training=True)
            loss = tf.reduce_mean(outputs**2)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for _ in range(3):
        repl.run(step_fn)
    expected = model(X, training=False).numpy()
    folder = tmp_path / "saved"
    if way == "export":
        model.export(str(folder), verbose=False)
    else:
        signature = tf.function(
            lambda x: model(x, training=False),
            input_signature=[tf.TensorSpec([None, 3])],
        )
        module = tf.Module()
        module.serve, module.kept = signature, [v.value for v in model.variables]
        tf.saved_model.save(module, str(folder))
    served = serve(folder, "serve", tmp_path)
    np.testing.assert_allclose(served["arr_0"], expected, rtol=1e-5, atol=1e-6)
    repl.run(step_fn)  # training still works after exporting
    helpers.assert_replicas_equal(model.trainable_variables)
