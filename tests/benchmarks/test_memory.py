# SPDX-License-Identifier: Apache-2.0
"""The benchmark of memory counts everything, once."""

import pytest
import tensorflow as tf

from benchmarks import contenders, memory, networks
from tests import helpers
from tests.benchmarks.helpers import results


@pytest.mark.mirrored
def test_components_are_counted_once_each():
    plain = tf.Variable(tf.zeros([3, 5]))
    assert memory.counted([plain, plain]) == 60
    with helpers.make(4).context():
        assert memory.counted([tf.Variable(tf.zeros([3, 5]))]) == 240


def test_slots_are_counted_and_mirrored():
    network = networks.Perceptron(8, 8, 1)
    weights = 4 * (8 * 8 + 8 + 8 * 10 + 10)
    one = memory.counted(memory.train(contenders.BASELINE, network))
    ours = memory.counted(memory.train(contenders.MIRRORED, network))
    # Adam has two slots, plus its step count and learning rate.
    assert 3 * weights < one < 3 * weights + 100
    assert ours == 2 * one


def test_sharded_variables_take_half():
    network = networks.Perceptron(64, 64, 3)
    ours = memory.counted(memory.train(contenders.MIRRORED, network))
    sharded = memory.counted(memory.train(contenders.OURS, network))
    assert 0.5 <= sharded / ours < 0.52


@pytest.mark.slow
def test_contenders_are_measured_in_processes_of_their_own(tmp_path):
    printed, facts = results("benchmarks.memory", tmp_path, "--units=1024")
    measurements = facts["results"]
    mirrored, one = measurements["Replicator, mirrored"], measurements["one device"]
    assert (
        mirrored["counted"]
        == 2 * one["counted"]
        == measurements["MirroredStrategy"]["counted"]
    )
    for by_kind in measurements.values():
        assert 0.9 * by_kind["counted"] < by_kind["resident"] <= by_kind["peak"]
    assert "resident / mirrored" in printed
