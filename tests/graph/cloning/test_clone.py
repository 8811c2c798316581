# SPDX-License-Identifier: Apache-2.0
"""Copies have what is their own: numbers, names, inputs; Python runs once.

That copies compute what built replicas do is an axis of tests/programs.
"""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.graph.passes import kernels
from tests import helpers
from tests.programs import catalogue, runner

v1 = tf.compat.v1


def test_copies_draw_numbers_of_their_own() -> None:
    program = catalogue.PROGRAMS["random_ops_with_seeds"]
    repl = helpers.make(4, build="clone")
    (noise, branch, _), _ = runner.outcome(program, "eager", repl)
    assert len({value.tobytes() for value in noise}) == 4
    assert len({value.tobytes() for value in branch}) == 4


@pytest.mark.parametrize("of", ["products", "broadcasts"])
def test_copies_have_second_derivatives_of_their_own(of: str) -> None:
    """Gradients of control flow make constants anew, of the first replica's values."""
    program = catalogue.PROGRAMS[f"second_gradients_of_{of}"]
    repl = helpers.make(3, build="clone")
    results, _ = runner.outcome(program, "eager", repl)
    runner.compare(program, results, 3, "copies")


@pytest.mark.parametrize("replica_id", range(4))
def test_assertions_name_the_replicas_own_tensors(replica_id: int) -> None:
    repl = helpers.make(4, build="clone")

    def step(x: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_less(tf.identity(x, "mine"), 1.0)
        return x

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        repl.run(step, lambda ctx: tf.constant(float(ctx.replica_id == replica_id)))
    assert f"replica_{replica_id}/mine" in str(caught.value)


@pytest.mark.battery(5)
@pytest.mark.parametrize("place", ["step", "branch", "function", "argument"])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_assertions_name_the_replicas_own_inputs(mode: str, place: str) -> None:
    """An assertion on an input names a tensor that no replica has built."""
    named: list[str] = []

    def check(x: tf.Tensor) -> tf.Tensor:
        if place == "argument":
            x = tf.compat.v1.get_default_graph().capture(x)
        named.append(x.name)
        with tf.control_dependencies([tf.debugging.assert_less(x, np.int64(2))]):
            return tf.identity(x)

    def step(batch: Any) -> tf.Tensor:
        _, x = batch
        if place == "step":
            return check(x)
        if place == "branch":
            return tf.cond(x < 5, lambda: check(x), lambda: x)
        return tf.function(lambda: check(x))()

    def run(highest: int) -> Any:
        elements = np.arange(4), np.arange(highest - 3, highest + 1)
        return helpers.run(
            mode,
            helpers.make(4, build="clone"),
            lambda: step,
            lambda: helpers.untuned(tf.data.Dataset.from_tensor_slices(elements)),
        )

    assert list(run(1)) == [-2, -1, 0, 1]
    assert len(named) == 1
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        run(2)
    assert "assertion failed" in str(caught.value)
    if place != "argument":  # a copied function's arguments have other names
        (asserted,) = {*re.findall(r"\[x \((.*?)\) = ", str(caught.value))}
        assert asserted != named[0] and "step_inputs" in asserted


def test_python_runs_once_for_all_replicas() -> None:
    """What Python counts or draws is the same on all, as in a tf.function."""
    repl = helpers.make(4, build="clone")
    calls: list[int] = []

    def step(x: tf.Tensor) -> Any:
        calls.append(1)
        seen: list[int] = []

        def note(x: Any) -> Any:
            seen.append(int(x))
            return np.int32(0)

        noted = tf.numpy_function(note, [x], tf.int32)
        with tf.control_dependencies([noted + repl.all_reduce(noted)]):
            total = tf.numpy_function(lambda: np.int32(sum(seen)), [], tf.int32)
        return repl.all_reduce(1), tf.constant(len(calls)), total

    results = repl.run(step, lambda ctx: tf.constant(ctx.replica_id))
    assert [[int(x) for x in column] for column in results] == [
        [4] * 4,
        [1] * 4,
        [6] * 4,
    ]
    assert len(calls) == 1


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("given", ["input", "argument"])
def test_static_shapes_do_not_depend_on_the_values_of_inputs(
    given: str, mode: str
) -> None:
    """TensorFlow folds constants into shapes; those of replicas 0 and 1 are alike."""
    repl = helpers.make(4, build="clone")
    rows = [[1, 1, 1], [2, 2, 2], [1, 2, 3], [4, 4, 5]]

    def step(x: tf.Tensor) -> tf.Tensor:
        assert tf.get_static_value(x) is None
        unique, _ = tf.unique(x)
        return repl.all_gather(tf.reshape(unique, [tf.size(unique)]), axis=0)

    def input_fn(ctx: replicator.InputContext) -> tf.Tensor:
        return tf.constant(rows[ctx.replica_id])

    def run() -> list[tf.Tensor]:
        if given == "input":
            return list(repl.run(step, input_fn))
        values = [tf.constant(row) for row in rows]
        return list(repl.run(step, args=(replicator.PerReplica(values),)))

    if mode == "session":
        with tf.Graph().as_default():
            fetches = run()
            with helpers.monitored_session() as session:
                results = session.run(fetches)
    else:
        results = (tf.function(run) if mode == "function" else run)()
    for result in results:
        np.testing.assert_array_equal(result, [1, 2, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_inputs_that_are_one_tensor_on_replica_0_alone(mode: str) -> None:
    rows = [tf.constant([float(r), 1.0]) for r in range(4)]
    first, second = rows[:3], [rows[0], rows[2], rows[3]]

    def run(build: str) -> list[Any]:
        repl = helpers.make(3, build=build)
        args = replicator.PerReplica(first), replicator.PerReplica(second)

        def step(one: tf.Tensor, two: tf.Tensor) -> tf.Tensor:
            return one + 10.0 * two + 100.0 * rows[0]

        def call() -> list[Any]:
            return list(repl.run(step, args=args))

        return tf.function(call)() if mode == "function" else call()

    np.testing.assert_array_equal(run("clone"), run("trace"))


@pytest.mark.parametrize("build", ["trace", "clone"])
def test_a_layer_that_keeps_tensors_of_its_first_call(build: Any) -> None:
    """Keras 3 reads mean and variance in `build` only, which clones call once."""
    repl = helpers.make(3, build=build)
    with repl.context():
        layer = keras.layers.Normalization()

    def run() -> Any:
        return repl.run(lambda x: layer(x), lambda context: tf.ones([2, 4]))

    if build == "trace":
        with pytest.raises(
            replicator.ReplicatorError, match=r"(?s)test_clone.*Fix: .* layer "
        ) as caught:
            run()
        assert "before the step" in str(caught.value)
        with repl.context():
            layer = keras.layers.Normalization()
            layer.build((None, 4))
    for value in run():
        np.testing.assert_array_equal(value, np.ones([2, 4]))


def test_copies_wait_for_what_the_first_replica_waits_for() -> None:
    repl = helpers.make(2, build="clone")
    with tf.Graph().as_default():
        before = tf.no_op("before")

        def step_fn() -> tf.Tensor:
            with tf.control_dependencies([before]):
                return tf.identity(helpers.opaque(1.0))

        for result in repl.run(step_fn):
            assert before in helpers.ops_run(result)


# --- Functions, which copies share if nothing but devices would differ ----------------


def _elements(ctx: replicator.InputContext) -> tf.Tensor:
    return tf.reshape(tf.range(6.0), [2, 3]) / 7.0 + ctx.replica_id


def _loop(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
    """The derivative of a loop with a branch, which reads a variable."""

    def turn(n: tf.Tensor, y: tf.Tensor) -> Any:
        y = tf.cond(n % 2 > 0, lambda: tf.tanh(y @ w), lambda: y * tf.reduce_sum(w))
        return n + 1, y

    with tf.GradientTape() as tape:
        tape.watch(x)
        _, y = tf.while_loop(lambda n, _: n < 4, turn, (tf.constant(0), x))
    return tape.gradient(y, x)


def _built(count: int, build: str) -> tuple[tf.Graph, list[tf.Tensor], Any]:
    repl = helpers.make(count, build=build, kernels=False)
    with repl.context():
        w = tf.Variable(np.sin(np.arange(9.0, dtype=np.float32)).reshape(3, 3))
    results = repl.run(lambda x: _loop(x, w), _elements)
    return v1.get_default_graph(), list(results), w.initializer


def _functions(count: int) -> int:
    with tf.Graph().as_default():
        graph, _, _ = _built(count, "clone")
        return len(graph.as_graph_def().library.function)


def test_functions_are_as_many_for_any_number_of_replicas() -> None:
    """Each costs as much as all ops around it: to build, and for the runtime."""
    assert _functions(3) == _functions(6)


def test_each_replica_runs_them_on_its_own_device() -> None:
    found: list[Any] = []
    for build in ("trace", "clone"):
        with tf.Graph().as_default():
            _, results, init = _built(4, build)
            options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
            metadata = v1.RunMetadata()
            with v1.Session() as session:
                session.run(init)
                values = session.run(results, options=options, run_metadata=metadata)
        ran = {
            stats.device: sum("while" in node.node_name for node in stats.node_stats)
            for stats in metadata.step_stats.dev_stats
        }
        on = [n for device, n in sorted(ran.items()) if "/device:CPU:" in device]
        found.append((values, [n > 0 for n in on[:4]]))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == [True] * 4


def test_products_in_them_are_transposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    replace = kernels.replace
    monkeypatch.setattr(kernels, "replace", lambda *of: counts.append(replace(*of)))
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((768, 512))

    def step(rows: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda n, _: n < 2,
            lambda n, y: (n + 1, y + tf.linalg.matmul(rows, matrix, transpose_b=True)),
            (0, tf.zeros((8, 768), tf.float64)),
        )[1]

    with tf.Graph().as_default() as graph:
        repl = helpers.make(5, build="clone", kernels=True)
        inputs = rng.standard_normal((5, 8, 512))
        results = repl.run(step, lambda ctx: tf.constant(inputs[ctx.replica_id]))
        names = [f.signature.name for f in graph.as_graph_def().library.function]
        with v1.Session() as session:
            values = session.run(list(results))
    np.testing.assert_allclose(values, inputs @ matrix.T * 2, rtol=1e-9)
    assert counts == [5]
    assert sum("kernels" in name for name in names) == 2  # of replica 0, and the others
