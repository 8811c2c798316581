# SPDX-License-Identifier: Apache-2.0
"""The devices that a Replicator accepts, and its errors for all others."""

from __future__ import annotations

import os

import pytest
import tensorflow as tf

import replicator
from replicator import DeviceError
from tests import forks, helpers


def _cpu(index: int) -> str:
    return f"/job:localhost/replica:0/task:0/device:CPU:{index}"


@pytest.mark.parametrize(
    "names",
    [
        ["CPU:0", "CPU:1"],
        ["cpu:0", "cpu:1"],
        ["/cpu:0", "/CPU:1"],
        ["CPU", "CPU:1"],
        ["/device:CPU:0", "device:cpu:1"],
        [_cpu(0), _cpu(1)],
        ["/job:localhost/task:0/cpu:0", "/task:0/device:CPU:1"],
        ("CPU:0", "CPU:1"),
        iter(["CPU:0", "CPU:1"]),
        [["CPU:0"], ["CPU:1"]],
        [d.name for d in tf.config.list_logical_devices("CPU")[:2]],
    ],
    ids=lambda names: type(names).__name__,  # no address: workers compare the names
)
def test_names_are_completed(names):
    repl = replicator.Replicator(names)
    assert repl.devices == (_cpu(0), _cpu(1))
    assert repl.num_replicas == 2


def test_replicas_are_in_the_order_of_the_devices():
    repl = replicator.Replicator(["CPU:3", "CPU:1"], build="trace")
    assert repl.devices == (_cpu(3), _cpu(1))
    placed = []
    repl.run(lambda: placed.append(tf.random.uniform([]).device))
    assert placed == [_cpu(3), _cpu(1)]


@pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="there is an accelerator"
)
def test_none_is_the_cpu_where_there_is_no_accelerator():
    assert replicator.Replicator().devices == (_cpu(0),)
    assert replicator.Replicator(None).num_replicas == 1


def test_none_is_all_accelerators(monkeypatch):
    logical = tf.config.list_logical_devices("CPU")[:1] + [
        tf.config.LogicalDevice(f"/device:GPU:{k}", "GPU") for k in range(2)
    ]
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda *_: logical)
    assert replicator.Replicator().devices == tuple(
        f"/job:localhost/replica:0/task:0/device:GPU:{k}" for k in range(2)
    )


REFUSED = {
    "twice": (["CPU:0", "CPU:0"], f"{_cpu(0)} is listed more than.*Fix: give each"),
    "twice, by two names": (["/cpu:1", _cpu(1)], f"{_cpu(1)} is listed more than once"),
    "twice, nested": ([["CPU:0", "CPU:1"], ["CPU:1"]], "is listed more than once"),
    "unknown type": (
        ["banana:0"],
        r"'banana:0' is not a device name\..*Fix: name devices",
    ),
    "accelerator": (["GPU:7"], "GPU:7 does not exist; there are .*CPU:0, .*CPU:7"),
    "other job": (["/job:worker/task:0/device:CPU:0"], "job:worker.* does not exist"),
    "negative": (["CPU:-1"], "CPU:-1 does not exist.*Fix: name devices from this list"),
    "no number": (["CPU:one"], "'CPU:one' is not a device name"),
    "any": (["CPU:*"], "not a device name"),
    "no name": ([""], "'' is not a device name"),
    "job only": (["/job:localhost/task:0"], "is not a device name"),
    "None inside": ([None], "None is not a device name"),
    "number inside": ([0, 1], "0 is not a device name"),
    "logical device": (
        tf.config.list_logical_devices("CPU")[:1],
        "is not a device name",
    ),
    "a string": ("CPU:0", r"devices is the string 'CPU:0'\..*Fix: .*\['CPU:0'\]"),
    "a number": (2, r"devices is 2\..*Fix: pass a list of names"),
    "nothing": ([], r"devices is \[\], which names no device\..*Fix: name at least"),
    "nothing for one": (["CPU:0", []], "which names no device"),
    "too late": (
        ["CPU:0", "CPU:8"],
        r"(?s)CPU:8 does not exist.*Fix: the CPU can only be split before TensorFlow.*"
        r"in a notebook, restart the kernel.*"
        r"tf\.config\.set_logical_device_configuration\(.*\* 9\)",
    ),
}


@pytest.mark.parametrize(("names", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_device_is_refused(names, said):
    with pytest.raises(DeviceError, match=f"(?s){said}") as caught:
        replicator.Replicator(names)
    assert isinstance(caught.value, ValueError)


# --- Several devices per replica -----------------------------------------------------


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_replica_may_have_several_devices(mode):
    repl = replicator.Replicator([["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]])
    assert repl.devices == (_cpu(0), _cpu(2))
    placed = []

    def step_fn():
        first = tf.random.uniform([])
        with repl.logical_device(1):
            second = tf.random.uniform([])
        placed.append((first.device, second.device))
        return repl.all_reduce(first + second, "sum")

    one, two = helpers.run(mode, repl, lambda: step_fn)
    assert one == two
    assert placed[-2:] == [(_cpu(0), _cpu(1)), (_cpu(2), _cpu(3))]


@pytest.mark.parametrize("index", [-1, 2])
def test_logical_device_says_how_many_there_are(index):
    repl = replicator.Replicator([["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]])

    def step_fn():
        with repl.logical_device(index):
            return tf.constant(1)

    with pytest.raises(
        replicator.ReplicatorError,
        match=f"(?s)logical_device on replica 0 was given index {index}, but the "
        r"replica has 2 devices.*test_devices\.py:\d+ in step_fn.*Fix: 0 <= index < 2",
    ):
        repl.run(step_fn)


def test_logical_device_belongs_into_a_step():
    repl = helpers.make(2)
    with pytest.raises(
        replicator.ContextError, match="logical_device was called outside a step"
    ):
        repl.logical_device(0)


# --- Before TensorFlow has started ---------------------------------------------------

_ADVICE = """\
tf.config.set_logical_device_configuration(
      tf.config.list_physical_devices("CPU")[0],
      [tf.config.LogicalDeviceConfiguration()] * 3)"""

_CASES = {
    "importing starts nothing, and the advice helps": f"""
import replicator
{_ADVICE}
assert len(tf.config.list_logical_devices("CPU")) == 3
assert replicator.Replicator(["CPU:2", "CPU:0"]).num_replicas == 2
""",
    "the CPU is split": """
import replicator
repl = replicator.Replicator(["CPU:0", "CPU:1", "CPU:2"])
assert len(tf.config.list_logical_devices("CPU")) == 3
assert [int(x) for x in repl.run(lambda: repl.replica_id)] == [0, 1, 2]
replicator.Replicator(["CPU:2"])
""",
    "one CPU is left whole, and then it is too late": f"""
import replicator
replicator.Replicator(["CPU:0"])
cpu = tf.config.list_physical_devices("CPU")[0]
assert tf.config.get_logical_device_configuration(cpu) is None
try:
    replicator.Replicator(["CPU:0", "CPU:2"])
except replicator.DeviceError as error:
    advice = str(error).partition("anything else of TensorFlow,")[2].strip()
assert advice == {_ADVICE!r}, advice
""",
}


@pytest.mark.parametrize("program", _CASES.values(), ids=_CASES)
def test_in_a_fresh_process(program):
    process = forks.run(
        ["-c", "import tensorflow as tf\n" + program],
        {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert process.returncode == 0, process.stderr
