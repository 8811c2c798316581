# SPDX-License-Identifier: Apache-2.0
"""All workloads compute on two replicas what one device computes."""

import dataclasses

import numpy as np
import pytest

from benchmarks import contenders, networks, workloads

NAMES = {w.name: w for w in workloads.WORKLOADS}
TINY = {
    "small": networks.Perceptron(4, 4, 1),
    "resnet20": networks.ResNet(1, (8, 8, 3), (4, 8)),
    "lstm": networks.LanguageModel(8, 2, 6),
    "wide": networks.WideAndDeep(500, 4, (8,)),
}


def tiny(name: str) -> workloads.Workload:
    return dataclasses.replace(NAMES[name], network=TINY[name], batch=8)


def test_workloads_have_names_of_their_own():
    assert len(NAMES) == len(workloads.WORKLOADS)
    assert len({w.title for w in workloads.WORKLOADS}) == len(workloads.WORKLOADS)


def test_parts_are_the_batch():
    workload = tiny("wide")
    ((numbers, values), labels) = workload.network.batch(8)
    parts = workload.parts(2)
    assert len(parts) == 2 and len(parts[0][1]) == 4
    np.testing.assert_array_equal(np.concatenate([p[0][0] for p in parts]), numbers)
    np.testing.assert_array_equal(np.concatenate([p[0][1] for p in parts]), values)
    np.testing.assert_array_equal(np.concatenate([p[1] for p in parts]), labels)


@pytest.mark.battery(5)
@pytest.mark.parametrize("options", contenders.OPTIONS.values(), ids=contenders.OPTIONS)
@pytest.mark.parametrize("name", TINY)
def test_replicas_compute_what_one_device_does(name, options):
    workload = tiny(name)
    weights = contenders.initial_weights(workload)
    one = contenders.one_device(workload, 2, weights)
    ours = contenders.replicated(workload, 2, weights, **options)
    losses = [(float(one()), float(ours())) for _ in range(3)]
    assert losses[2][0] < losses[0][0]  # each step uses the previous update
    if workload.batch_norm:  # replicas normalize by their own examples
        assert losses[2][1] < losses[0][1]
    else:
        np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-4)


def test_only_the_rows_of_the_step_are_read_and_written():
    workload = tiny("wide")
    step = contenders.one_device(workload, 1, contenders.initial_weights(workload))
    ops = step.get_concrete_function().graph.get_operations()
    whole = [t.shape for op in ops for t in op.outputs if 500 in t.shape.as_list()]
    assert not whole
    assert sum(op.type == "ResourceScatterSub" for op in ops) == 2
