"""Splits the CPU into eight logical devices before anything of TensorFlow runs.

Helpers that several test files share are in tests/helpers.py.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

NUM_CPUS = 8

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * NUM_CPUS,
)
