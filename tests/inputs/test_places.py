# SPDX-License-Identifier: Apache-2.0
"""The hosts of replicas."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator.inputs import places

HERE = "/job:localhost/replica:0/task:0/device:"
A = "/job:worker/replica:0/task:0/device:"
B = "/job:worker/replica:0/task:1/device:"


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([f"{HERE}CPU:0", f"{HERE}GPU:1"], [0, 0]),
        ([f"{B}CPU:0", f"{A}CPU:0", f"{B}CPU:1"], [0, 1, 0]),
        ([f"{HERE}CPU:0", f"{A}CPU:0"], [0, 1]),
    ],
)
def test_hosts_are_numbered_as_they_occur(devices, expected):
    assert places.hosts(devices) == expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([f"{HERE}CPU:3"], None),
        ([f"{A}GPU:3"], f"{A}CPU:0"),
        ([f"{A}GPU:3", f"{A}GPU:4"], f"{A}CPU:0"),
        ([f"{A}GPU:3", f"{B}GPU:3"], None),
    ],
)
def test_a_pipeline_is_made_on_the_host_of_those_it_feeds(devices, expected):
    assert places.home(devices) == expected


def test_what_is_for_several_hosts_is_divided_in_this_process():
    devices = [f"{A}GPU:3", f"{B}GPU:3"]
    assert places.middle(devices[1:]) == f"{B}CPU:0"
    assert places.middle(devices) == f"{HERE}CPU:0"
    with tf.Graph().as_default():  # its session may not know this process
        assert places.middle(devices) is None


def test_a_place_that_is_none_leaves_ops_where_they_would_be():
    with tf.Graph().as_default(), tf.device("CPU:1"):
        with places.at(None):
            assert tf.constant(0).device == "/device:CPU:1"
        with places.at("/device:CPU:2"):
            assert tf.constant(0).device == "/device:CPU:2"
