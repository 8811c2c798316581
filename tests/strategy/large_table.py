# SPDX-License-Identifier: Apache-2.0
"""Creates a large embedding in parts, and prints the memory use, as JSON.

`python -m tests.strategy.large_table`, in a process of its own, since the peak memory
of a process covers its whole life.
"""

from __future__ import annotations

import collections
import json
import pathlib
from typing import Any

import tensorflow as tf

import replicator
from replicator import strategy

ROWS, COLUMNS = 1_000_000, 64
DEVICES = ("CPU:0", "CPU:1")


def resident(kind: str) -> int:
    """Returns this process's resident bytes, "VmRSS", or their peak, "VmHWM"."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024


def trained(rows: int) -> tuple[Any, list[tf.Variable], Any]:
    """Returns a step with a lookup, all variables, and the Replicator."""
    repl = replicator.Replicator(DEVICES, strategy=strategy.PartitionedPS())
    with repl.context():
        layer = tf.keras.layers.Embedding(rows, COLUMNS, name="table")
        layer.build()
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam())
        optimizer.build(layer.trainable_variables)

    def step_fn() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(tf.range(8) * (rows // 8)) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, layer.trainable_variables, strict=True)
        )
        return loss

    variables = [v.value for v in (*layer.variables, *optimizer.variables)]
    return repl.build(step_fn), variables, repl


def held(variables: list[Any]) -> dict[str, int]:
    """Returns how many bytes of variables each device holds."""
    by_component = {
        id(one): (one.device, one.shape.num_elements() * one.dtype.size)
        for variable in variables
        for part in getattr(variable, "parts", ()) or (variable,)
        for one in part.components
    }
    totals: dict[str, int] = collections.Counter()
    for device, nbytes in by_component.values():
        totals[device] += nbytes
    return dict(totals)


def main() -> None:
    """Measures the large table after a small one, which fills TensorFlow's caches."""
    step, *_ = trained(16)
    step()
    before = resident("VmRSS")
    step, variables, repl = trained(ROWS)
    after, peak = resident("VmRSS"), resident("VmHWM")
    by_device = held(variables)
    losses = [float(step()[0]) for _ in range(2)]
    print(
        json.dumps(
            {
                "held": [by_device[device] for device in repl.devices],
                "resident": after - before,
                "peak": peak - before,
                "losses": losses,
            }
        )
    )


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * len(DEVICES)
    tf.config.set_logical_device_configuration(cpu, two)
    main()
