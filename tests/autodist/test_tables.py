# SPDX-License-Identifier: Apache-2.0
"""The tables of ops name ops that TensorFlow has."""

from __future__ import annotations

import tensorflow as tf

from replicator.autodist import tables


def test_every_op_of_the_tables_is_one_of_tensorflow() -> None:
    for name, types in vars(tables).items():
        if name.isupper():
            missing = [one for one in types if not hasattr(tf.raw_ops, one)]
            assert not missing, f"{name} has {missing}"
