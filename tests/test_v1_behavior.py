# SPDX-License-Identifier: Apache-2.0
"""Programs that disable TensorFlow 2's behavior train like all others.

Each disables it in a process of its own, since it cannot be restored. `make test-v1`
runs all tests with sessions in such a process.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

PROGRAM = """
import sys

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
getattr(v1, sys.argv[1])()

import replicator

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 3,
)
MAKERS = [
    lambda: v1.train.AdamOptimizer(0.1),
    lambda: v1.train.GradientDescentOptimizer(0.1),
    lambda: tf.keras.optimizers.SGD(0.1, momentum=0.5),
]
DATA = np.sin(np.arange(3 * 2 * 4, dtype=np.float32)).reshape(3, 2, 4)


def trained(make, count, variables="mirrored", accumulation_steps=1):
    parts = DATA.reshape(count, -1, 4)
    with tf.Graph().as_default():
        repl = replicator.Replicator(
            [f"CPU:{r}" for r in range(count)], variables=variables
        )
        with repl.context():
            w = tf.Variable(np.cos(np.arange(12, dtype=np.float32)).reshape(4, 3))
            table = tf.Variable(np.ones((5, 4), np.float32))
            optimizer = repl.wrap_optimizer(
                make(), accumulation_steps=accumulation_steps
            )

        def step(x):
            rows = tf.cast(tf.abs(x[:, 0]) * 5, tf.int32)
            with tf.GradientTape() as tape:
                y = tf.matmul(x * tf.gather(table, rows), w)
                loss = tf.reduce_mean(tf.nn.relu(y) ** 2)
            variables = [w, table]
            grads = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(grads, variables))
            result = repl.all_reduce({"loss": loss, "y": y[0]}, "mean")
            return result, repl.all_gather(x)

        fetches = repl.run(step, lambda ctx: tf.constant(parts[ctx.replica_id]))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(v1.local_variables_initializer())
            for _ in range(4):
                (result, gathered) = session.run(fetches)
            np.testing.assert_array_equal(gathered[-1].reshape(DATA.shape), DATA)
            return result["loss"][0], *session.run([w.read_value(), table.read_value()])


for make in MAKERS[1:] if sys.argv[1] == "disable_v2_behavior" else MAKERS[:1]:
    expected = trained(make, 1)
    for options in ({}, {"variables": "sharded"}):
        for one, two in zip(expected, trained(make, 3, **options)):
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    expected = trained(make, 1, accumulation_steps=2)
    for one, two in zip(expected, trained(make, 3, accumulation_steps=2)):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)

v1.disable_control_flow_v2()
with tf.Graph().as_default():
    repl = replicator.Replicator(["CPU:0", "CPU:1"])
    with repl.context():
        v = tf.Variable(1.0)
    yes = v1.placeholder(tf.bool, [])

    def step():
        tf.debugging.assert_less(v.read_value(), 9.0)
        taken = tf.cond(yes, lambda: v.assign_add(1.0) + 0.0, lambda: 0.0)
        return tf.while_loop(lambda x: x < 9.0, repl.all_reduce, [taken + 1.0])[0]

    fetches = repl.run(step)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        got = [session.run(fetches, {yes: on})[1] for on in (True, False)]
assert got == [12.0, 16.0], got
print("as all others do")
"""


@pytest.mark.battery(5)
@pytest.mark.parametrize("call", ["disable_v2_behavior", "disable_v2_tensorshape"])
def test_training_in_sessions(call: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, call], capture_output=True, text=True
    )
    assert run.stdout == "as all others do\n", run.stderr[-3000:]


# Fast test files of the packages that handle sessions.
FILES = [
    "optimizers/test_accumulators.py",
    "step/test_outputs.py",
    "test_savers.py",
    "primitives/test_order.py",
    "variables/test_writing.py",
]


@pytest.mark.slow
def test_tests_in_sessions_pass() -> None:
    here = pathlib.Path(__file__).parent
    command = ["-m", "pytest", "--v1", "-k", "session and not eager", "-q"]
    options = ["-m", "not slow", "-p", "no:cacheprovider"]
    files = [str(here / name) for name in FILES]
    run = subprocess.run(
        [sys.executable, *command, *options, *files],
        capture_output=True,
        text=True,
        cwd=here.parent,
    )
    assert run.returncode == 0, run.stdout[-3000:]
    assert int(run.stdout.split(" passed")[0].split()[-1]) > 30, run.stdout[-3000:]
